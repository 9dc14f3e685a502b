"""The network, part by part."""
