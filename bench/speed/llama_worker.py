"""Reads a prompt and generates greedily with llama.cpp; LlamaCppContestant of contestants.py runs it.

It runs in a Python of its own, one that has the package llama-cpp-python, and imports nothing else. Each line of its input is a
JSON list of token ids to evaluate; an empty list stands for the token that it drew last, and null for a new context. It answers
each line by one with the next token, or null. A first line, null, says that the model is loaded.
"""

import json
import sys

from llama_cpp import Llama

path, context, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model = Llama(path, n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False)
token = None
print(json.dumps(token), flush=True)
for line in sys.stdin:
    ids = json.loads(line)
    if ids is None:
        model.reset()
        token = None
    else:
        model.eval(ids or [token])
        token = int(model.sample(temp=0.0, repeat_penalty=1.0))
    print(json.dumps(token), flush=True)
