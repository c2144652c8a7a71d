"""The protocol of Tinker's public client, over the trainer and rollout servers.

tinker_wire.py     request bodies as segments and objectives; tinker.proto, tinker_pb2.py: their fields
store.py           requests and answers, in one file
training.py        training runs, one at a time on the devices
samplers.py        which server holds which weights
sampling_calls.py  completions and log-probs by these weights
tinker_app.py      routes
command.py         scalerl-tinker
"""
