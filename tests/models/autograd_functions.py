"""Autograd functions as users write them."""

import torch


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.strength * gradient, None


class ManualCheckpoint(torch.autograd.Function):
    """A checkpoint as older libraries write it."""

    @staticmethod
    def forward(ctx, run, x, *parameters):
        ctx.run, ctx.state = run, torch.get_rng_state()
        ctx.save_for_backward(x, *parameters)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, gradient):
        x, *parameters = ctx.saved_tensors
        now, x = torch.get_rng_state(), x.detach().requires_grad_()
        torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            out = ctx.run(x)
        torch.set_rng_state(now)
        return None, *torch.autograd.grad(out, [x, *parameters], gradient)
