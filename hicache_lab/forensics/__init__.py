"""Logs, memory series and incident cases → timeline, cause and remedy."""
