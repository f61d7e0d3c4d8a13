"""`python -m plait` is the command `plait`, so that `torchrun -m plait train run.toml` works. It holds nothing else."""

import sys

from plait.cli.main import main

sys.exit(main())
