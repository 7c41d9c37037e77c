"""`python -m ninfer_torch.cli`, for when the command is not on the path."""

import sys

from ninfer_torch.cli import main

sys.exit(main())
