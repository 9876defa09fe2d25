//! The daemon's figures as Prometheus reads them.
//!
//! Everything that is counted is a plain counter in the engine already, so nothing is registered and nothing
//! is kept here: figures go in, a page comes out ([`page`]). Names follow Prometheus' conventions (base
//! units, `_total`), and are documented in `docs/metrics.md`. A host with a thousand files must not
//! make a hundred thousand series, so a disk has at most [`SERIES_MAX`], and of a datastore's files only the
//! busiest have rows of their own ([`fold`]).

pub mod figures;
mod health;
mod text;

pub use figures::{Device, Disk, Pool, Row, SERIES_MAX, Swap, fold, page};
pub use health::{Judged, with_health};
pub use text::Form;
