"""Overlapping Local Decentralized SGD: the public API."""
