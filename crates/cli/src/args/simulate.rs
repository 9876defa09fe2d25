//! The grammar of `hearth simulate`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::trace::parse_format;
use super::{Size, parse_size};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WriteTo {
    /// Every write goes on flash at once
    #[value(name = "write-back")]
    Back,
    /// Written blocks go on flash by their merit; the origin has them
    #[value(name = "write-through")]
    Through,
    /// Written blocks go to the origin only
    #[value(name = "write-around")]
    Around,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Log {
    /// The oldest segment is freed, as earlier versions did
    Oldest,
    /// The segment is freed that costs least for what it gives, as the daemon does
    Cleaned,
}

#[derive(Clone, Debug, Args)]
#[command(
    after_help = "Example:\n  hearth simulate hm_1.csv.gz --size 1%,5%,10%,20%,40% --policy all\n  \
    hearth simulate a.hearth b.hearth --size 50G --policy hearth,lru,arc --svg curves.svg\n\n\
  hearth simulate vm1.hearth --size 20G --policy hearth --write-mode write-through --seq-cutoff 0\n\n\
    The origin is a disk with one arm (--disk-access, --disk-rate; by default 8 ms and 150 MB/s, a\n\
    hard disk). What is read ahead counts as a hit if it was there in time, and takes the disk's\n\
    time like any read. A guest that has to wait sends its next request as much later."
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
    /// s3-fifo, s3-fifo-d, clock2q+, sieve, larc, opt (knows the future)
    #[arg(
        long,
        value_name = "NAME,...",
        value_delimiter = ',',
        default_value = "all"
    )]
    pub policy: Vec<String>,
    /// What hearth does with written blocks; the other policies always renew flash
    #[arg(long, value_enum, default_value = "write-back")]
    pub write_mode: WriteTo,
    /// What hearth may write to flash, per second in the long run [default: no limit]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub flash_rate: Option<Size>,
    /// Sequential reads longer than this are not cached; 0 caches all
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "1M")]
    pub seq_cutoff: Size,
    /// Unit in which misses are filled, 4K to 1M
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "4K")]
    pub block_size: Size,
    /// Flash kept for each disk of the trace
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "0")]
    pub min: Size,
    /// Most flash each disk of the trace may use; 0 for no limit
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "0")]
    pub max: Size,
    /// Segments of the pool [default: of 1 MiB, or 128 smaller ones in a cache too small for a pool]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(8..))]
    pub segments: Option<u32>,
    /// Segments kept free [default: as many as the daemon keeps]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub reserve: Option<u32>,
    /// How the log comes free
    #[arg(long, value_enum, default_value = "cleaned")]
    pub log: Log,
    /// Time the disk takes to get to a place, microseconds
    #[arg(long, value_name = "US", alias = "prefetch-latency", default_value_t = 8000,
        value_parser = clap::value_parser!(u64).range(1..=60_000_000))]
    pub disk_access: u64,
    /// What the disk reads in a second once it is there
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "150000000")]
    pub disk_rate: Size,
    /// Requests the guest has in flight at most
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub in_flight: u16,
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
