//! Measures Hearth beside its peers, in turn, on the same files, within one run.
//!
//! Absolute speed belongs to the machine; ratios belong to the program. So every row runs its
//! contenders round by round (A B C, A B C, …) and compares within a round. [`rows`] is the table
//! of the program `hearth-bench`; [`vm`] is `hearth bench`, which anybody may point at disks of
//! their own. Both share the load generators ([`load`]), the fixtures and the arithmetic.

pub mod aab;
pub mod args;
pub mod bare;
pub mod bare_nfs;
pub mod devices;
pub mod esxi;
pub mod fio;
pub mod fixture;
pub mod ganesha;
pub mod host;
pub mod load;
pub mod made;
pub mod modelled;
pub mod nfs;
pub mod overcommit;
mod paged;
pub mod peers;
pub mod report;
pub mod rows;
pub mod vm;
