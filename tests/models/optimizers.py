"""Optimizers of users: their steps read more than one parameter at a time."""

import torch


class Lamb(torch.optim.Optimizer):
    """Adam's direction scaled by a trust ratio per parameter; gradients are clipped by their norm over all first."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.999), eps=1e-3, weight_decay=0.01, max_grad_norm=0.1):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "max_grad_norm": max_grad_norm}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        global_norm = torch.zeros(1, dtype=torch.float64)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    global_norm.add_(p.grad.pow(2).sum())
        global_norm = global_norm.sqrt()
        for group in self.param_groups:
            clip = global_norm / group["max_grad_norm"]
            clip = torch.where(clip > 1, clip, torch.ones_like(clip))
            beta1, beta2 = group["betas"]
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad / clip
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                mean = state["exp_avg"] / (1 - beta1 ** group["step"])
                update = mean / ((state["exp_avg_sq"] / (1 - beta2 ** group["step"])).sqrt() + group["eps"])
                update.add_(p, alpha=group["weight_decay"])
                weight_norm, update_norm = p.norm(2), update.norm(2)
                ones = torch.ones_like(weight_norm)
                trust = torch.where((weight_norm > 0) & (update_norm > 0), weight_norm / update_norm, ones)
                p.add_(update * trust, alpha=-group["lr"])
        return loss


class ScaledByNorm(torch.optim.SGD):
    """The step size depends on the norm of all gradients, which is read as a number."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        total = torch.nn.utils.get_total_norm([p.grad for g in self.param_groups for p in g["params"]]).item()
        if total > 0.01:
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad.div_(total)
        super().step()
        return loss


class ScaledByRows(torch.optim.Optimizer):
    """Stores one number for each row of a parameter, made by the gradient's `new_zeros`."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["rows"] = p.grad.new_zeros((p.shape[0],) + (1,) * (p.dim() - 1))
                    state["scale"] = p.grad.new_ones(())
                rows = p.grad.square().reshape(p.shape[0], -1).mean(1).view_as(state["rows"])
                state["rows"].lerp_(rows, 0.5)
                state["scale"].mul_(0.9)
                p.addcdiv_(p.grad, state["rows"].sqrt() + 1e-3, value=-group["lr"])
                p.sub_(p.grad * state["scale"])
        return loss


class SharpnessAware(torch.optim.Optimizer):
    """Climbs by the normalised gradient, and descends by the gradient found there: the closure runs twice."""

    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.norm(torch.stack([p.grad.norm(p=2) for p in parameters]), p=2)
        for p in parameters:
            self.state[p]["before"] = p.data.clone()
            p.add_(p.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)))
        closure()
        for p in parameters:
            p.data = self.state[p]["before"]
        self.base.step()
        return loss


class Lookahead(torch.optim.Optimizer):
    """Interpolates back every second step; a wrapper without torch's `__init__`, with copies made in its own."""

    def __init__(self, base):
        self.base, self.param_groups, self.defaults, self.state = base, base.param_groups, base.defaults, base.state
        self.slow = [[p.detach().clone() for p in group["params"]] for group in base.param_groups]
        self.last_first = [p for group in base.param_groups for p in group["params"]][::-1]
        self.steps = 0

    def step(self, closure=None):
        loss = self.base.step(closure)
        self.steps += 1
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            for p, q in zip(group["params"], slow, strict=True):
                if self.steps % 2 == 0:
                    q.add_(p.data - q, alpha=0.5)
                    p.data.copy_(q)
        for p in self.last_first:
            p.data.mul_(0.99)
        return loss

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)

    def state_dict(self):
        return self.base.state_dict()

    def load_state_dict(self, state):
        self.base.load_state_dict(state)
