"""TensorFlow and Keras: what is wrapped in them, which Keras runs, what their graphs say."""
