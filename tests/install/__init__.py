"""The commands of docs/install.md and docs/operations.md, as written, on a machine of their own
under systemd."""
