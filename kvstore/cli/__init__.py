"""The `kvstore` command: one file for each subcommand, imported only when it is used."""
