"""Reinforcement learning: agents that play while they train, targets that are copied, several epochs in one step."""

import copy
import random
from collections import deque

import numpy as np
import torch
from conformance.case import Case, tensor_loaders, waves
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

OBSERVED, ACTIONS = 4, 2


class Pendulum:
    """A small deterministic environment; an episode ends after six steps."""

    def reset(self):
        self.state, self.time = np.linspace(-0.5, 0.5, OBSERVED, dtype=np.float32), 0
        return self.state

    def step(self, action):
        push = 0.3 if action == 1 else -0.3
        self.state = np.tanh(np.roll(self.state, 1) + push * np.cos(np.arange(OBSERVED) + self.time)).astype(np.float32)
        self.time += 1
        return self.state, float(1.0 - np.abs(self.state).mean()), self.time % 6 == 0


def mlp(n_in, n_out, hidden=8):
    return nn.Sequential(
        nn.Linear(n_in, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, n_out)
    )


class ReplayDataset(IterableDataset):
    """Samples from the buffer as it is when an epoch of it begins."""

    def __init__(self, buffer, sample_size=24):
        self.buffer, self.sample_size = buffer, sample_size

    def __iter__(self):
        yield from random.sample(list(self.buffer), self.sample_size)


class DQN(LightningModule):
    """Plays a step in each training step; the target network is copied every few batches."""

    def __init__(
        self, lr=1e-2, gamma=0.99, sync_rate=2, replay_size=100, warm_start=30, eps_start=1.0, eps_last_frame=4
    ):
        super().__init__()
        self.save_hyperparameters()
        self.net, self.target_net = mlp(OBSERVED, ACTIONS), mlp(OBSERVED, ACTIONS)
        self.buffer, self.env = deque(maxlen=replay_size), Pendulum()
        self.state, self.total_reward, self.episode_reward = self.env.reset(), 0.0, 0.0
        for _ in range(warm_start):
            self.play_step(1.0)

    def play_step(self, epsilon):
        if random.random() < epsilon:
            action = random.randrange(ACTIONS)
        else:
            with torch.no_grad():
                action = int(self.net(torch.tensor(self.state[None], device=self.device, dtype=self.dtype)).argmax(1))
        following, reward, done = self.env.step(action)
        self.buffer.append((self.state, action, reward, done, following))
        self.state = self.env.reset() if done else following
        return reward, done

    def forward(self, x):
        return self.net(x)

    def dqn_mse_loss(self, batch):
        states, actions, rewards, dones, next_states = batch
        values = self.net(states).gather(1, actions.long().unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            next_values = self.target_net(next_states).max(1)[0]
            next_values[dones] = 0.0
        return F.mse_loss(values, next_values.detach() * self.hparams.gamma + rewards)

    def training_step(self, batch, batch_idx):
        epsilon = max(0.1, self.hparams.eps_start - self.global_step / self.hparams.eps_last_frame)
        reward, done = self.play_step(epsilon)
        self.episode_reward += reward
        loss = self.dqn_mse_loss(batch)
        if done:
            self.total_reward, self.episode_reward = self.episode_reward, 0.0
        if self.global_step % self.hparams.sync_rate == 0:
            self.target_net.load_state_dict(self.net.state_dict())
        self.log_dict({"reward": reward, "train_loss": loss, "total_reward": self.total_reward})
        return loss

    def train_dataloader(self):
        return DataLoader(ReplayDataset(self.buffer), batch_size=8)

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), lr=self.hparams.lr)


class Episodes(IterableDataset):
    """Plays with the policy of the moment and yields what was seen, done, and earned until the end."""

    def __init__(self, agent, batches):
        self.agent, self.batches, self.env = agent, batches, Pendulum()

    def __iter__(self):
        for _ in range(self.batches):
            states, actions, rewards = [self.env.reset()], [], []
            while True:
                state = torch.as_tensor(states[-1], dtype=self.agent.dtype, device=self.agent.device)
                with torch.no_grad():
                    action = int(Categorical(logits=self.agent(state)).sample())
                state, reward, done = self.env.step(action)
                actions.append(action)
                rewards.append(reward)
                if done:
                    break
                states.append(state)
            returns, total = [], 0.0
            for reward in reversed(rewards):
                total = reward + self.agent.gamma * total
                returns.insert(0, total)
            yield from zip(np.stack(states), actions, returns, strict=True)


class Reinforce(LightningModule):
    """Monte Carlo policy gradient; the loader plays whole episodes."""

    def __init__(self, gamma=0.9, lr=1e-2, entropy_beta=0.01):
        super().__init__()
        self.save_hyperparameters()
        self.gamma, self.net = gamma, mlp(OBSERVED, ACTIONS)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        states, actions, returns = batch
        policy = Categorical(logits=self(states.to(self.dtype)))
        scaled = (returns - returns.mean()) / (returns.std() + 1e-6)
        loss = -(policy.log_prob(actions) * scaled).mean() - self.hparams.entropy_beta * policy.entropy().mean()
        self.log_dict({"loss": loss, "return": returns.mean()}, on_step=True)
        return loss

    def train_dataloader(self):
        return DataLoader(Episodes(self, 6), batch_size=12)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class PPO(LightningModule):
    """One rollout is used for several epochs of minibatches, inside the step, with two optimizers."""

    def __init__(self, clip_ratio=0.2, lr_actor=3e-3, lr_critic=1e-2, nb_optim_iters=2, minibatch=4):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.actor, self.critic = mlp(OBSERVED, ACTIONS), mlp(OBSERVED, 1)

    def forward(self, state):
        return Categorical(logits=self.actor(state)), self.critic(state).squeeze(-1)

    def training_step(self, batch, batch_idx):
        state, action, reward = batch
        with torch.no_grad():
            policy, value = self(state)
            old_logp, advantage = policy.log_prob(action), reward - value
            advantage = (advantage - advantage.mean()) / advantage.std()
        actor_optimizer, critic_optimizer = self.optimizers()
        for _ in range(self.hparams.nb_optim_iters):
            for index in torch.arange(len(state)).split(self.hparams.minibatch):
                policy, value = self(state[index])
                ratio = torch.exp(policy.log_prob(action[index]) - old_logp[index])
                clipped = ratio.clamp(1 - self.hparams.clip_ratio, 1 + self.hparams.clip_ratio) * advantage[index]
                actor_loss = -torch.min(ratio * advantage[index], clipped).mean()
                actor_optimizer.zero_grad()
                self.manual_backward(actor_loss)
                self.clip_gradients(actor_optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
                actor_optimizer.step()
                critic_loss = F.mse_loss(value, reward[index])
                critic_optimizer.zero_grad()
                self.manual_backward(critic_loss)
                critic_optimizer.step()
        self.log_dict({"loss_actor": actor_loss, "loss_critic": critic_loss}, prog_bar=True, on_epoch=True)

    def configure_optimizers(self):
        return [
            torch.optim.Adam(self.actor.parameters(), lr=self.hparams.lr_actor),
            torch.optim.Adam(self.critic.parameters(), lr=self.hparams.lr_critic),
        ]


def rollouts():
    states = waves(OBSERVED)
    return tensor_loaders(states, torch.arange(len(states)) % ACTIONS, states.abs().sum(1))


class SoftActorCritic(LightningModule):
    """Twin critics, an actor that is drawn from, and targets that follow a little after each step."""

    def __init__(self, tau=0.1, gamma=0.9, alpha=0.1, lr=3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.policy = mlp(OBSERVED, 2)
        self.q1, self.q2 = mlp(OBSERVED + 1, 1), mlp(OBSERVED + 1, 1)
        self.target_q1, self.target_q2 = copy.deepcopy(self.q1), copy.deepcopy(self.q2)

    def act(self, state):
        mean, log_std = self.policy(state).chunk(2, -1)
        distribution = Normal(mean, log_std.clamp(-3, 1).exp())
        drawn = distribution.rsample()
        action = torch.tanh(drawn)
        return action, (distribution.log_prob(drawn) - torch.log(1 - action**2 + 1e-6)).sum(-1, keepdim=True)

    def training_step(self, batch, batch_idx):
        state, action, reward, done, following = batch
        actor_optimizer, critic_optimizer = self.optimizers()
        with torch.no_grad():
            next_action, log_probability = self.act(following)
            joined = torch.cat([following, next_action], 1)
            value = torch.min(self.target_q1(joined), self.target_q2(joined)) - self.hparams.alpha * log_probability
            target = reward + self.hparams.gamma * (1 - done) * value
        joined = torch.cat([state, action], 1)
        critic_loss = F.mse_loss(self.q1(joined), target) + F.mse_loss(self.q2(joined), target)
        critic_optimizer.zero_grad()
        self.manual_backward(critic_loss)
        critic_optimizer.step()
        self.toggle_optimizer(actor_optimizer)
        new_action, log_probability = self.act(state)
        joined = torch.cat([state, new_action], 1)
        actor_loss = (self.hparams.alpha * log_probability - torch.min(self.q1(joined), self.q2(joined))).mean()
        actor_optimizer.zero_grad()
        self.manual_backward(actor_loss)
        actor_optimizer.step()
        self.untoggle_optimizer(actor_optimizer)
        self.soft_update(self.q1, self.target_q1)
        self.soft_update(self.q2, self.target_q2)
        self.log_dict({"critic_loss": critic_loss, "actor_loss": actor_loss, "q": target.mean()})

    def soft_update(self, net, target):
        for parameter, other in zip(net.parameters(), target.parameters(), strict=True):
            other.data.copy_(self.hparams.tau * parameter.data + (1.0 - self.hparams.tau) * other.data)

    def configure_optimizers(self):
        critics = [*self.q1.parameters(), *self.q2.parameters()]
        return [torch.optim.Adam(group, lr=self.hparams.lr) for group in (self.policy.parameters(), critics)]


def transitions():
    states = waves(OBSERVED)
    action, reward = waves(1, phase=2.0), states.sum(1, keepdim=True)
    return tensor_loaders(states, action, reward, (reward > 1).float(), states.roll(1, 0))


CASES = [
    Case(DQN, None, draws=True),
    Case(Reinforce, None),
    Case(PPO, rollouts),
    Case(SoftActorCritic, transitions, draws=True),
]
