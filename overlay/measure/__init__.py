"""What training costs: measured (`overlay bench`), and by formula (`collectives`).

A worker (`bench_worker.py`) has one build of transformers and one model, and answers questions; `run` asks the workers
of all builds in turn. What a worker imports needs torch, transformers and the standard library; pydantic and matplotlib
belong to `card` and `picture`, which are the asking side's.
"""
