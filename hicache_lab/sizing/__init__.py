"""Exact host-pool sizes: bytes a token (``rows``), one pool (``pools``), its check (``guard``), shares, one rank."""
