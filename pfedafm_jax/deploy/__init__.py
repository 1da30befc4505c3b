"""From simulation to a real federation: the same methods over a network, on Flower.

`pfedafm serve` is the server and `pfedafm node` a client; `docs/deploy.md` says how they are used.
What differs from the simulator is where a client's work is done, and nothing else.

wire.py      trees of arrays as bytes, messages as JSON and bytes; nothing is ever unpickled
node.py      one client: its data, its answers to the server; states.py its private state in files
server.py    rounds as questions to nodes; an `Experiment` whose clients are elsewhere; roster.py who they are
flower.py    Flower's processes and messages under both; the only file that imports it
launch.py    starts Flower's superlink and supernode
certs.py     an authority, the server's certificate, a key for each node
"""
