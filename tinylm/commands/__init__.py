"""One file a subcommand: options -> config -> one library call -> print."""
