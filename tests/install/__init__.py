"""The commands of docs/operations.md, run as written on a machine of their own under systemd."""
