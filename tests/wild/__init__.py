"""Programs of others under Evener: `make wild`. See tests/wild/README.md."""
