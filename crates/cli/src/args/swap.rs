//! The grammar of `hearth swap`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use super::{Size, parse_size};

/// Where is kept what must outlive a reboot.
#[derive(Clone, Debug, Args)]
pub struct SwapState {
    /// Directory in which the area is noted [default: /var/lib/hearth]
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub enum Swap {
    /// Make an area beside the flash file, or in the pool, and have the kernel swap to it, also after a boot
    #[command(after_help = "Example:\n  hearth swap on --size 8G\n  \
        hearth swap on --size 8G --flash /srv/flash --priority 10\n  \
        hearth swap on --size 8G --in-pool --zswap\n  \
        hearth swap on --size 8G --in-pool --encrypt\n\n\
        It is a file beside the pool's flash file, and a part of the pool (--in-pool) where that is a whole device or partition.\n\
        Ctrl-C calls it off while room is made.")]
    On(SwapOn),
    /// Read back what is swapped out and take the area away
    #[command(after_help = "Example:\n  hearth swap off\n\n\
        Ctrl-C calls it off after the process the kernel is at: what was not read back yet stays where it is.")]
    Off(SwapState),
    /// Show the area, what is swapped out, and what was set for it
    #[command(after_help = "Example:\n  hearth swap show\n  hearth swap show --json")]
    Show(SwapState),
    /// Take the noted area into use again; the service does so at a boot
    #[command(after_help = "Example:\n  hearth swap resume")]
    Resume(SwapState),
}

#[derive(Clone, Debug, Args)]
pub struct SwapOn {
    /// How large
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub size: Size,
    /// The pool's flash file, beside which it is made [default: the running daemon's]
    #[arg(long, value_name = "PATH")]
    pub flash: Option<PathBuf>,
    /// Take it out of the pool that the running daemon serves [default where that is no file]
    #[arg(long, conflicts_with = "flash")]
    pub in_pool: bool,
    /// With --in-pool: on this flash device of the pool [default: the one with most on it]
    #[arg(long, value_name = "PATH", requires = "in_pool")]
    pub device: Option<PathBuf>,
    /// Of all swap of the host, the kernel fills that with the highest first
    #[arg(long, value_name = "N", default_value_t = 100,
        value_parser = clap::value_parser!(u16).range(0..=i64::from(hearth_swap::kernel::PRIORITY_MAX)))]
    pub priority: u16,
    /// Tell the device what is free
    #[arg(long, value_enum, default_value = "off")]
    pub discard: Discard,
    /// Encrypt what is swapped out, with a key that is made anew each time and that nobody knows; of a part of the pool, where the
    /// kernel has dm-crypt
    #[arg(long)]
    pub encrypt: bool,
    /// Compress pages in memory first (zswap), so that fewer are swapped out
    #[arg(long)]
    pub zswap: bool,
    #[command(flatten)]
    pub state: SwapState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Discard {
    /// No
    Off,
    /// All of it, when it is taken into use
    Once,
    /// Also what becomes free later
    Pages,
}
