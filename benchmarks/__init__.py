"""Measurements that need more than the package: a slow network, other frameworks."""
