"""The configuration of a run.

sections    every section and key, with its type, default and help
load        a YAML file and key=value arguments -> a checked Config
check       rejects contradictory settings; derives the number of threads
plugins     finds models, formats and modes by name; suggests names
yaml_files  strict YAML with the line of each error
machine     cores, memory and operating system of this machine
"""
