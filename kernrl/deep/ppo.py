"""Proximal policy optimisation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from kernrl import arrays, checks
from kernrl.agent import Agent
from kernrl.data.collect import Step
from kernrl.deep.encoding import Encoder
from kernrl.deep.networks import FlatAdam, head, mlp, numpy_forward, numpy_layers, one_thread
from kernrl.deep.rollout import Rollout
from kernrl.deep_alignment.ops.advantage import gae, whiten
from kernrl.deep_alignment.ops.policy import policy_loss
from kernrl.deep_alignment.ops.value import value_loss

Seed = int | np.random.Generator | np.random.SeedSequence | None
OPTIONAL = ("max_grad_norm", "target_kl", "value_clip")  # None switches them off


class PPO(Agent):
    """Clipped policy gradient on fresh rollouts, with a learnt value as baseline.

    Per rollout of `n_steps` steps in each of b environments: advantages by GAE; then `n_epochs`
    passes over its rows in minibatches of

        loss = −min(ρA, clip(ρ, 1 − ε, 1 + ε) A) + value_weight · ½ (V − R)² − entropy_bonus · H.

    Schulman et al. (2017), eq. 9. Actions may be Discrete, MultiDiscrete, MultiBinary or Box (a
    diagonal Gaussian, ±1 mapped to the bounds). A time limit is bootstrapped from the true final
    observation, and a vector env's reset rows are left out. Defaults are the usual ones for long
    rollouts of one environment; small tasks learn faster from short rollouts of eight.

    Parameters
    ----------
    n_steps : steps per environment and rollout.
    n_epochs, batch_size : passes over a rollout, rows of a minibatch. A rollout is cut into equal
        minibatches of at most that many rows.
    gamma, trace_decay : discount, and λ of GAE.
    learning_rate, anneal_learning_rate : Adam's step size; True lets it fall linearly to 0.
    clip, anneal_clip : ε, one number or (low, high); True lets it fall linearly to 0.
    value_clip : keep V within ± this of its value at sampling time; None does not.
    value_weight : weight of ½ (V − R)²; 1 is the coefficient 0.5 of codes without the ½.
    entropy_bonus : weight of the policy's entropy.
    max_grad_norm : the gradient's norm is cut to this; None does not.
    target_kl : stop a rollout's passes when KL(old‖new) exceeds this; None never.
    whiten_advantages : whiten A over each rollout.
    standardise : standardise observations by running moments, which are saved with the agent and
        do not move in prediction.
    hidden : widths of the tanh layers of policy and value network.
    rng : seed or NumPy Generator.

    Learnt: `actor_`, `critic_`, `head_` (torch modules, all in `network_`), `encoder_`. Logged per
    rollout: policy_loss, value_loss, entropy, kl, clip_fraction, explained_variance.

    >>> agent = PPO(n_steps=64, rng=0).fit("CartPole-v1", 128)
    >>> agent.predict([0.0, 0.0, 0.0, 0.0]) in (0, 1)
    True
    """

    def __init__(
        self,
        *,
        n_steps: int = 2048,
        n_epochs: int = 10,
        batch_size: int = 64,
        gamma: float = 0.99,
        trace_decay: float = 0.95,
        learning_rate: float = 3e-4,
        anneal_learning_rate: bool = False,
        clip: float | tuple[float, float] = 0.2,
        anneal_clip: bool = False,
        value_clip: float | None = None,
        value_weight: float = 1.0,
        entropy_bonus: float = 0.0,
        max_grad_norm: float | None = 0.5,
        target_kl: float | None = None,
        whiten_advantages: bool = True,
        standardise: bool = False,
        hidden: Sequence[int] = (64, 64),
        rng: Seed = None,
    ) -> None:
        self.n_steps = n_steps
        self.n_epochs = n_epochs
        self.batch_size = batch_size
        self.gamma = gamma
        self.trace_decay = trace_decay
        self.learning_rate = learning_rate
        self.anneal_learning_rate = anneal_learning_rate
        self.clip = clip
        self.anneal_clip = anneal_clip
        self.value_clip = value_clip
        self.value_weight = value_weight
        self.entropy_bonus = entropy_bonus
        self.max_grad_norm = max_grad_norm
        self.target_kl = target_kl
        self.whiten_advantages = whiten_advantages
        self.standardise = standardise
        self.hidden = hidden
        self.rng = rng

    # ------------------------------------------------------------ building

    def _begin(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        n_envs: int,
        total_steps: int,
    ) -> None:
        self._check_parameters()
        self._build(observation_space, action_space)
        self._adam = FlatAdam(self.network_.parameters())
        self._total_steps, self._started = total_steps, 0
        self._rollout: list[tuple[Step, np.ndarray]] = []

    def _build(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
        generator = torch.Generator().manual_seed(arrays.fresh_seed(self.rng_))
        self.encoder_ = Encoder(observation_space, self.standardise)
        self.head_ = head(self._owner, action_space)
        d, k = self.encoder_.size, self.head_.n_outputs
        with one_thread():
            # A small last layer makes the first policy near uniform, so early data are varied.
            self.actor_ = mlp(d, self.hidden, k, gain=0.01, generator=generator)
            self.critic_ = mlp(d, self.hidden, 1, gain=1.0, generator=generator)
        self.network_ = torch.nn.ModuleList([self.actor_, self.critic_, self.head_])
        self._take_weights()

    def _take_weights(self) -> None:
        """What acting and predicting read: the same memory, but not so in a copied agent."""
        self._actor, self._critic = numpy_layers(self.actor_), numpy_layers(self.critic_)

    def _check_parameters(self) -> None:
        def check(names: str, function: Any, **bounds: Any) -> None:
            for name in names.split():
                if (value := getattr(self, name)) is not None or name not in OPTIONAL:
                    function(self._owner, name, value, **bounds)

        check("n_steps n_epochs batch_size", checks.integer, at_least=1)
        check("gamma trace_decay", checks.real, at_least=0.0, at_most=1.0)
        check("learning_rate value_weight entropy_bonus value_clip", checks.real, at_least=0.0)
        check("max_grad_norm target_kl", checks.real, above=0.0)
        for width in self.hidden:
            checks.integer(self._owner, "every width in hidden", width, at_least=1)
        rule = "clip must be one number or (low, high), not negative"
        pair = np.size(self.clip) in (1, 2) and np.all(np.asarray(self.clip) >= 0)
        checks.require(bool(pair), self._owner, rule, repr(self.clip))

    # ------------------------------------------------------------ acting

    def _outputs(self, observations: np.ndarray) -> np.ndarray:  # (b, …) -> (b, k)
        return numpy_forward(self._actor, self.encoder_(observations))

    def act(self, observations: np.ndarray) -> np.ndarray:  # (b, …) -> (b, …)
        """Actions drawn from the policy."""
        self._drawn = self.head_.sample(self._outputs(observations), self.rng_)
        return self.head_.to_env(self._drawn)

    def _actions(self, observations: np.ndarray, deterministic: bool) -> np.ndarray:
        outputs = self._outputs(observations)
        chosen = (
            self.head_.mode(outputs) if deterministic else self.head_.sample(outputs, self.rng_)
        )
        return self.head_.to_env(chosen)

    def _values(self, observations: np.ndarray) -> np.ndarray:
        return numpy_forward(self._critic, self.encoder_(observations))[:, 0]

    def observe(self, step: Step) -> None:
        """Keep the step, with the action as it was drawn (a Box action is clipped for the env)."""
        self._rollout.append((step, self._drawn))

    # ------------------------------------------------------------ learning

    def update(self) -> int:
        """Learn once the rollout is full."""
        return self._learn() if len(self._rollout) == self.n_steps else 0

    def _end(self) -> None:
        # What is left over makes a last update if it fills a minibatch; a handful of rows would
        # only add noise to a finished policy.
        rows = sum(step.n_valid for step, _ in self._rollout)
        if rows >= self.batch_size or (rows and not self.n_updates_):
            self.n_updates_ += self._learn()
        self._rollout = []

    def _learn(self) -> int:
        """All passes over the rollout; returns the number of minibatches used."""
        steps, drawn = zip(*self._rollout, strict=True)
        self._rollout = []
        seen = np.concatenate([step.observations[step.valid] for step in steps])
        if not len(seen):
            return 0
        # The first policy is near uniform whatever it reads, so its own rollout may set the
        # scale. Later a shift under the data would pass for a step of the policy: update after.
        first = self.encoder_.count == 0
        if self.standardise and first:
            self.encoder_.update(seen)
        with one_thread():
            used = self._passes(self._prepare(steps, np.stack(drawn, axis=1)))
        if self.standardise and not first:
            self.encoder_.update(seen)
        self._take_weights()
        self._started = self.steps_
        return used

    @torch.no_grad()
    def _prepare(self, steps: Sequence[Step], drawn: np.ndarray) -> Rollout:
        """Advantages, returns and old log-probabilities; valid rows only."""

        def column(name: str) -> np.ndarray:  # (b, t, …)
            return np.stack([getattr(step, name) for step in steps], axis=1)

        def tensor(name: str) -> Tensor:
            return torch.from_numpy(column(name))

        inputs = torch.from_numpy(self.encoder_(column("observations")))
        reached = torch.from_numpy(self.encoder_(column("next_observations")))
        valid = tensor("valid")
        value = self.critic_(inputs).squeeze(-1)
        advantage, returns = gae(
            tensor("rewards").float(),
            value,
            self.critic_(reached).squeeze(-1),
            tensor("terminated"),
            tensor("truncated"),
            gamma=self.gamma,
            trace_decay=self.trace_decay,
            mask=valid,
        )
        value, advantage, returns = value[valid], advantage[valid], returns[valid]
        inputs, actions = inputs[valid], torch.from_numpy(drawn)[valid]
        logprob, _ = self.head_(self.actor_(inputs), actions)
        if self.whiten_advantages:
            advantage = whiten(advantage)
        return Rollout(inputs, actions, logprob, value, advantage, returns)

    def _passes(self, rollout: Rollout) -> int:
        remaining = 1.0 - self._started / self._total_steps
        rate = self.learning_rate * (remaining if self.anneal_learning_rate else 1.0)
        low, high = np.broadcast_to(self.clip, 2) * (remaining if self.anneal_clip else 1.0)
        if (explained := rollout.explained_variance()) is not None:
            self.record("explained_variance", explained)
        used = 0
        passes = (rollout.minibatches(self.batch_size, self.rng_) for _ in range(self.n_epochs))
        for batch in chain.from_iterable(passes):
            loss, metrics = self._loss(batch, (float(low), float(high)))
            if self.target_kl is not None and float(metrics["kl"]) > self.target_kl:
                break
            self._adam.step(loss, rate, self.max_grad_norm)
            used += 1
        for name, value in metrics.items():  # of the last minibatch, the furthest from the data
            self.record(name, float(value))
        return used

    def _loss(self, batch: Rollout, clip: tuple[float, float]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of one minibatch and what is logged of it."""
        logprob, entropy = self.head_(self.actor_(batch.inputs), batch.actions)
        value = self.critic_(batch.inputs).squeeze(-1)
        policy, seen = policy_loss(logprob, batch.logprob, batch.advantage, clip=clip)
        fit, _ = value_loss(value, batch.value, batch.returns, clip=self.value_clip)
        loss = policy + self.value_weight * fit
        mean_entropy = entropy.mean()
        if self.entropy_bonus:
            loss = loss - self.entropy_bonus * mean_entropy
        return loss, {
            "policy_loss": policy.detach(),
            "value_loss": fit.detach(),
            "entropy": mean_entropy.detach(),
            "kl": seen["kl_k3"],
            "clip_fraction": seen["clip_fraction_low"] + seen["clip_fraction_high"],
        }

    # ------------------------------------------------------------ files

    def _state(self) -> dict[str, np.ndarray]:
        weights = {name: x.numpy().copy() for name, x in self.network_.state_dict().items()}
        return weights | {f"encoder.{name}": x for name, x in self.encoder_.state().items()}

    def _restore(self, state: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
        position = self.rng_.bit_generator.state
        self._build(self.observation_space_, self.action_space_)
        self.rng_.bit_generator.state = position  # building drew from it
        names = self.network_.state_dict()
        self.network_.load_state_dict({name: torch.tensor(state[name]) for name in names})
        self.encoder_.restore({name: state[f"encoder.{name}"] for name in self.encoder_.state()})
