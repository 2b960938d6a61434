"""Fuzz: random engines, requests and troubles, with every text compared with plain decoding.

    eesd bench exact --random SEED [--minutes M | --tokens N]
    python -m eesd_dist.bench.fuzz --model FOLDER --random SEED

An engine of the fuzz is a pure function of the seed and its number (`drawing`). It runs in this
process (`play`) with threads as ranks (`pipeline`), and every text, finish reason and
log-probability is compared with the same request alone on a plain engine (`reference`). A failing
engine is written as a case file that can be replayed. Needs neither Ray nor a server.

With `--processes` the ranks are processes over links (`linked_pipeline`), killed and stopped in the
middle of rounds. That needs Ray's package, since they are the actors of a service, but no cluster.
"""
