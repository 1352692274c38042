"""Run by every interpreter of the CPU server before anything else: put the stand-ins in place."""

import hicache_stubs

hicache_stubs.install()
