"""Runs inside the rivals' environment: an LRU of libcachesim over a binary trace, once; prints JSON.

python rival_libcachesim.py TRACE.oracleGeneral CAPACITY HASHPOWER
"""

import json
import sys
import time

import libcachesim

path, capacity, hashpower = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
reader = libcachesim.TraceReader(path, libcachesim.TraceType.ORACLE_GENERAL_TRACE)
cache = libcachesim.LRU(cache_size=capacity, hashpower=hashpower)
start = time.process_time()
miss_rate = float(cache.process_trace(reader)[0])
print(json.dumps({"seconds": time.process_time() - start, "miss_rate": miss_rate}))
