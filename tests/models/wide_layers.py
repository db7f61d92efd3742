"""A decoder layer of any width: grouped queries with norms on heads, and a gated MLP."""

import torch
from torch import nn
from torch.nn import functional as F


class GatedLayer(nn.Module):
    def __init__(self, width, hidden, *, num_heads, num_kv_heads, head_norm=False):
        super().__init__()
        self.head_dim = width // num_heads
        self.norm, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(width, width)
        self.q_norm = nn.RMSNorm(self.head_dim) if head_norm else nn.Identity()
        self.gate, self.up, self.down = nn.Linear(width, hidden), nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.repeats = num_heads // num_kv_heads

    def heads(self, x):
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, x):
        h = self.norm(x)
        q, k, v = self.q_norm(self.heads(self.q_proj(h))), self.heads(self.k_proj(h)), self.heads(self.v_proj(h))
        k, v = (torch.repeat_interleave(each, self.repeats, 1) for each in (k, v))
        x = x + self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm_2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))
