"""Where parts are saved: Keras' files, `tf.train.Checkpoint`, v1 Savers."""
