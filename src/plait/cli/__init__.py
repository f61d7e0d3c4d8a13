"""The command line, one thin file per command: flags in, one call of the library, words or JSON out. No logic here."""
