"""TensorFlow's graphs.

walks, writers, data_sets    needs, results and writes of operations
copies, functions            parts of a graph, inserted elsewhere or called
branches, outermost          where code is built
variables, replicas          variables of the library, values of all replicas
names                        types of operations, by their effects
internals                    names of TensorFlow that are not public
"""
