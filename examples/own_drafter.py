"""A draft method of your own: propose the token that followed the last one when it was seen before.

python examples/own_drafter.py
"""

import torch

import draftwing as dw


class LastPair(dw.Drafter):
    name = "last-pair"
    costs_forwards = False  # no network

    def propose(self, ctx, sampling, budget):
        chains = []
        for row in ctx.rows:  # row.tokens: the prompt and everything emitted
            followers = dict(zip(row.tokens, row.tokens[1:], strict=False))
            chain = [row.tokens[-1]]
            while len(chain) <= budget.depth and chain[-1] in followers:
                chain.append(followers[chain[-1]])
            chains.append(chain + [-1] * (budget.depth + 1 - len(chain)))  # -1: no token
        return dw.DraftTree.chain(torch.tensor(chains))


class LastPairMethod(dw.DraftMethod):
    def new_drafter(self, source):
        return LastPair


dw.register("last-pair", LastPairMethod, "the token that followed the last one before")

prompt = [{"role": "user", "content": "Repeat four times: red, green, blue."}]
drafted = dw.load(draft="last-pair", budget=dw.Budget(4)).generate(prompt, max_tokens=48)[0]
baseline = dw.load(draft="none").generate(prompt, max_tokens=48)[0]
print(drafted.text)
print(f"tau {drafted.tau:.2f}, acceptance by depth {[round(share, 2) for share in drafted.stats.alpha]}")
print("the same text without drafts:", drafted.token_ids == baseline.token_ids)
