"""The agent of a node: starts and watches its processes, and connects them with the leader."""
