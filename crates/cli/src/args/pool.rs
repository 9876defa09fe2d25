//! The grammar of `hearth pool`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{Size, parse_size};

#[derive(Debug, Subcommand)]
pub enum Pool {
    /// Format flash as a new pool
    #[command(
        after_help = "Example:\n  hearth pool create --flash /dev/nvme0n1p4\n  \
        hearth pool create --flash /var/lib/hearth/flash --size 100G --label vmhost7"
    )]
    Create(PoolCreate),
    /// Show a pool: on flash, or the one being served
    #[command(
        after_help = "Example:\n  hearth pool show\n  hearth pool show --flash /dev/nvme0n1p4"
    )]
    Show(PoolAt),
    /// Check a pool brought from elsewhere, and make it ready to be served here
    #[command(after_help = "Example:\n  hearth pool import --flash /dev/nvme0n1p4")]
    Import(PoolAt),
    /// Write everything dirty to the origins, so that the pool can leave and the origins stand alone
    #[command(
        after_help = "Example:\n  hearth pool export\n  hearth pool export --yes\n  hearth pool export --flash /dev/nvme0n1p4"
    )]
    Export(PoolExport),
}

#[derive(Clone, Debug, Args)]
pub struct PoolCreate {
    /// Block device or file
    #[arg(long, required = true, value_name = "PATH")]
    pub flash: Vec<PathBuf>,
    /// Make a new file of this size
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub size: Option<Size>,
    /// With --size: only reserve the space instead of writing the file once; the first writes
    /// to the cache are slower then
    #[arg(long, requires = "size")]
    pub quick: bool,
    /// Overwrite what is there: a file system, a partition table, another pool, an existing file;
    /// and allow a file in RAM
    #[arg(long)]
    pub force: bool,
    /// A name for the pool, for people
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub label: String,
}

#[derive(Clone, Debug, Args)]
pub struct PoolAt {
    /// Block device or file of a pool that is not being served
    #[arg(long, value_name = "PATH")]
    pub flash: Vec<PathBuf>,
}

#[derive(Clone, Debug, Args)]
pub struct PoolExport {
    #[command(flatten)]
    pub at: PoolAt,
    /// Yes, cut off clients that are connected
    #[arg(long)]
    pub yes: bool,
    /// The directory that `hearth serve` was given for what must outlive the flash
    /// [default: /var/lib/hearth for root, $XDG_STATE_HOME/hearth for others]
    #[arg(long, value_name = "DIR", requires = "flash")]
    pub state_dir: Option<PathBuf>,
}
