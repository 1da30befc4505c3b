"""Every setting of a run, with its default, range and meaning, and named sets of them.

`config` is what all methods share and `method_settings` how one method says its own; `presets` and
`configs/*.toml` are named values. Types and ranges are checked here, names of data, networks and
methods where they are looked up. Imports `base`; but the `Settings` of the methods stand in
`methods/`, so `method_settings.every_method` imports that folder, by name, when a method's settings are
first asked for.
"""
