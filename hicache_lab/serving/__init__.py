"""A server over HTTP: client, load, the CPU server, one measurement against its prediction."""
