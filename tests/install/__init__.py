"""The commands of docs/install.md and docs/operations.md, run as written on a machine under systemd."""
