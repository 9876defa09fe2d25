//! The grammar of `hearth bench`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use super::{Mode, Over, Size, parse_size};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BenchTable {
    /// Random 4 KiB reads and writes
    Random,
    /// Mixed 16 KiB requests with an fsync now and then
    Fileio,
    /// Five guests started together; needs --guest
    Storm,
}

#[derive(Clone, Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Example:\n  hearth bench --quick\n  \
    hearth bench --slow /srv/images --flash /mnt/ssd --size 4G\n  \
    hearth bench compare monday/results.json tuesday/results.json\n\n\
    Only new files are written, in directories made for the run and removed after it. Ctrl-C ends\n\
    it; what was measured until then is kept. What the numbers mean: docs/bench-vm.md."
)]
pub struct Bench {
    #[command(subcommand)]
    pub command: Option<BenchCommand>,
    /// A directory on the slow disk [default: a modelled hard disk over files in --flash]
    #[arg(long, value_name = "DIR")]
    pub slow: Option<PathBuf>,
    /// A directory on the flash
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub flash: PathBuf,
    /// Where results.json, results.md and results.html go
    #[arg(long, value_name = "DIR", default_value = "hearth-bench")]
    pub out: PathBuf,
    /// Only these tables [default: random,fileio, and storm with --guest]
    #[arg(long, value_enum, value_name = "TABLE,...", value_delimiter = ',')]
    pub table: Vec<BenchTable>,
    /// Only over this protocol [default: both]
    #[arg(long, value_enum)]
    pub over: Option<Over>,
    /// Only these cache modes; off is always measured [default: all; with --quick write-back]
    #[arg(long, value_enum, value_name = "MODE,...", value_delimiter = ',')]
    pub mode: Vec<Mode>,
    /// Requests in flight
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,24",
        value_parser = clap::value_parser!(u32).range(1..=256))]
    pub depth: Vec<u32>,
    /// Rounds: every cell is measured once in each [default: 3; with --quick 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: Option<u32>,
    /// Seconds per cell and round [default: 2; with --quick 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub seconds: Option<u64>,
    /// Size of each disk, 16M to 1T; all of it goes on flash for the warm cells [default: 256M; with --quick 64M]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub size: Option<Size>,
    /// Directory with a guest's kernel, initrd and root.img; scripts/guest-lab.sh image makes one
    #[arg(long, value_name = "DIR")]
    pub guest: Option<PathBuf>,
    /// How often the boot storm's three rounds are measured
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=20))]
    pub storms: u32,
    /// Every table in full, and the goals this project has set itself: which are met, which missed
    #[arg(long)]
    pub goals: bool,
    /// Under two minutes: one short round on small disks
    #[arg(long)]
    pub quick: bool,
}

#[derive(Clone, Debug, Subcommand)]
pub enum BenchCommand {
    /// Say whether two runs agree within their spread; exit status 1 if not
    #[command(
        after_help = "Example:\n  hearth bench compare monday/results.json tuesday/results.json"
    )]
    Compare(BenchCompare),
}

#[derive(Clone, Debug, Args)]
pub struct BenchCompare {
    /// results.json of one run
    #[arg(value_name = "A")]
    pub a: PathBuf,
    /// results.json of the other
    #[arg(value_name = "B")]
    pub b: PathBuf,
}
