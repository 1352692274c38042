"""Run by every interpreter of the CPU server before anything else: put the stubs in place."""

import hicache_stubs

hicache_stubs.install()
