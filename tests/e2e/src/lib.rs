//! End-to-end tests. What they share with the benchmarks is `hearth_rig`.

pub use hearth_rig::*;
