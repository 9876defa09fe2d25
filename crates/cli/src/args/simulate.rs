//! The grammar of `hearth simulate`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::trace::parse_format;
use super::{Size, parse_size};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WriteTo {
    /// Written blocks go on flash by their merit; the origin has them
    WriteThrough,
    /// Every write goes on flash at once
    WriteBack,
}

#[derive(Clone, Debug, Args)]
#[command(
    after_help = "Example:\n  hearth simulate hm_1.csv.gz --size 1%,5%,10%,20%,40% --policy all\n  \
    hearth simulate a.hearth b.hearth --size 50G --policy hearth,lru,arc --svg curves.svg\n\n\
    Hits of prefetched blocks are counted as hits and shown apart: the simulator has no disk, so\n\
    it takes what is read ahead to be there after --prefetch-latency."
)]
pub struct Simulate {
    /// Traces in any form `hearth trace` reads
    #[arg(value_name = "TRACE", required = true)]
    pub traces: Vec<PathBuf>,
    /// Form of the traces [default: found out]
    #[arg(long, value_name = "FORM", value_parser = parse_format)]
    pub format: Option<hearth_trace::Format>,
    /// Cache sizes: shares of a trace's working set (5%) or sizes (20G)
    #[arg(
        long,
        value_name = "SIZE,...",
        value_delimiter = ',',
        default_value = "1%,5%,10%,20%,40%"
    )]
    pub size: Vec<String>,
    /// Policies: all, hearth, hearth-demand (without prefetch), lru, 2q, arc, lirs, w-tinylfu,
    /// s3-fifo, sieve, larc, opt (knows the future)
    #[arg(
        long,
        value_name = "NAME,...",
        value_delimiter = ',',
        default_value = "all"
    )]
    pub policy: Vec<String>,
    /// What hearth does with written blocks; the other policies always renew flash
    #[arg(long, value_enum, default_value = "write-through")]
    pub write_mode: WriteTo,
    /// What hearth may write to flash, per second in the long run [default: no limit]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub flash_rate: Option<Size>,
    /// Time a prefetched block takes to arrive, microseconds of the trace's time; asked for
    /// earlier, it counts as a miss
    #[arg(long, value_name = "US", default_value_t = 0)]
    pub prefetch_latency: u64,
    /// Count hits in so many equal parts of the trace too
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub parts: u16,
    /// Draw hit ratio over size into this file
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Threads [default: one per CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: Option<u16>,
}
