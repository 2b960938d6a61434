"""Random engines, random requests and random troubles, each text against plain decoding.

    eesd bench exact --random SEED [--minutes M | --tokens N]
    python -m eesd_dist.bench.fuzz --model FOLDER --random SEED

An engine of the fuzz is a pure function of the seed and its number (`draw_engines`,
`draw_requests`, `draw_troubles`); it is played in this process (`play`), its ranks being threads,
and every text, finish reason and log-probability is compared with the same request alone on a
plain engine (`reference`). A failure is made smaller (`reduction`) and written as a case file that
can be replayed. Needs neither Ray nor a server.
"""
