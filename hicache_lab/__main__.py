"""``python -m hicache_lab`` is ``hicache-lab``."""

import sys

from hicache_lab.cli import main

sys.exit(main())
