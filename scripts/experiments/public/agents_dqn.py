"""tensorflow/agents, DqnAgent: a target network, trained by a Learner."""

import bench
import keras_bench
import numpy as np
import removed
import tensorflow as tf

from estimator_accum import microbatch_step

for name in ("gym", "pygame"):  # of environments, which are not used
    removed.add_module(name, Env=object, Wrapper=object, Space=object)
removed.add_module("gym.spaces")

from tf_agents.agents.dqn.dqn_agent import DqnAgent
from tf_agents.networks.q_network import QNetwork
from tf_agents.specs import tensor_spec
from tf_agents.train.learner import Learner
from tf_agents.trajectories import time_step, trajectory
from tf_agents.utils import common

tf.keras.utils.set_random_seed(1)
observation = tensor_spec.TensorSpec([6], tf.float32)
action = tensor_spec.BoundedTensorSpec([], tf.int32, 0, 2)
counter = tf.Variable(0, dtype=tf.int64)
optimizer = tf.keras.optimizers.legacy.Adam(0.01)
agent = DqnAgent(
    time_step.time_step_spec(observation),
    action,
    q_network=QNetwork(observation, action, fc_layer_params=(16,)),
    optimizer=optimizer,
    td_errors_loss_fn=common.element_wise_huber_loss,
    target_update_period=5,
    gradient_clipping=1.0,
    train_step_counter=counter,
)
agent.initialize()


def fit(batches, count):
    pairs = batches.map(lambda experience: (experience, ()))
    folder = str(bench.read_flags().output_dir)
    learner = Learner(folder, counter, agent, lambda: pairs, checkpoint_interval=1000)
    agent.train = microbatch_step(agent.train, count)
    tf.config.run_functions_eagerly(True)
    learner.run(batches.cardinality().numpy())


observations = keras_bench.normal(2, 6)
middle = np.ones(observations.shape[:2], np.int32)  # of an episode
experience = trajectory.Trajectory(
    middle,
    observations,
    action=np.argmax(observations[..., :3], 2).astype(np.int32),
    policy_info=(),
    next_step_type=middle,
    reward=observations[..., 0],
    discount=middle.astype("f"),
)
variables = agent.policy.variables()
keras_bench.train(variables, optimizer, experience, fit)
