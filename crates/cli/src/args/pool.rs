//! The grammar of `hearth pool`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{Size, parse_size};

#[derive(Debug, Subcommand)]
pub enum Pool {
    /// Format flash as a new pool
    #[command(
        after_help = "Example:\n  hearth pool create --flash /dev/nvme0n1p4\n  \
        hearth pool create --flash /var/lib/hearth/flash --size 100G --label vmhost7\n  \
        hearth pool create --flash /dev/nvme0n1p4 --flash /dev/nvme1n1\n  \
        hearth pool create --dirty-copies 2 --flash /dev/nvme0n1p4 --flash /dev/nvme1n1"
    )]
    Create(PoolCreate),
    /// Show a pool: on flash, or the one being served
    #[command(
        after_help = "Example:\n  hearth pool show\n  hearth pool show --flash /dev/nvme0n1p4"
    )]
    Show(PoolShow),
    /// Check a pool brought from elsewhere, and make it ready to be served here
    #[command(
        after_help = "Example:\n  hearth pool import --flash /dev/nvme0n1p4\n  hearth pool import --accept"
    )]
    Import(PoolImport),
    /// Have a blank device take the place of flash that is gone: the pool's disks stay, the cache fills again
    #[command(
        after_help = "Example:\n  hearth pool adopt-flash --flash /dev/nvme1n1\n  \
        hearth pool adopt-flash --flash /var/lib/hearth/flash --size 100G"
    )]
    AdoptFlash(PoolAdopt),
    /// Give the pool one more flash device: the one that is served, which goes on, or one that is not
    #[command(after_help = "Example:\n  hearth pool add-flash /dev/nvme1n1\n  \
        hearth pool add-flash /srv/ssd2/flash --size 200G\n  \
        hearth pool add-flash --flash /dev/nvme0n1p4 /dev/nvme1n1")]
    AddFlash(FlashAdd),
    /// Have a new flash device take the place of one of the pool, with all that lies there
    #[command(
        after_help = "Example:\n  hearth pool replace-flash /dev/nvme0n1 /dev/nvme2n1\n  \
        hearth pool replace-flash --flash /dev/nvme0n1 /dev/nvme0n1 /dev/nvme2n1"
    )]
    ReplaceFlash(FlashReplace),
    /// Empty a flash device of the pool that is served, and take it out; of one that is not, take one out on which nothing lies
    #[command(after_help = "Example:\n  hearth pool remove-flash /dev/nvme1n1\n  \
        hearth pool remove-flash --flash /dev/nvme0n1 --flash /dev/nvme1n1 /dev/nvme1n1\n  \
        hearth pool remove-flash --cancel")]
    RemoveFlash(FlashRemove),
    /// Write everything dirty to the origins, so that the pool can leave and the origins stand alone
    #[command(
        after_help = "Example:\n  hearth pool export\n  hearth pool export --yes\n  hearth pool export --flash /dev/nvme0n1p4"
    )]
    Export(PoolExport),
}

#[derive(Clone, Debug, Args)]
pub struct PoolCreate {
    /// Block device or file; several, each with --flash, become one pool, of which the first carries the tables
    #[arg(long, required = true, value_name = "PATH")]
    pub flash: Vec<PathBuf>,
    /// Make a new file of this size; with several --flash one size for all, or one for each in their order
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub size: Vec<Size>,
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
    /// On how many flash devices dirty data is, which the origins do not have yet: with 2, any one device may die and nothing
    /// is lost. Clean data is on one, and what of it a lost device held is read from the origins again
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=2))]
    pub dirty_copies: u8,
}

#[derive(Clone, Debug, Args)]
pub struct PoolAdopt {
    /// Block device or file that is to be the pool's flash
    #[arg(long, value_name = "PATH")]
    pub flash: PathBuf,
    /// Make a new file of this size
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub size: Option<Size>,
    /// With --size: only reserve the space instead of writing the file once
    #[arg(long, requires = "size")]
    pub quick: bool,
    /// Overwrite what is there, and give up the pool's old flash although it is there still
    #[arg(long)]
    pub force: bool,
    /// Which pool, if several are known
    #[arg(long, value_name = "UUID")]
    pub pool: Option<String>,
    /// The state directory of `hearth serve`
    /// [default: /var/lib/hearth for root, $XDG_STATE_HOME/hearth for others]
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
}

#[derive(Clone, Debug, Args)]
pub struct PoolAt {
    /// Block device or file of a pool that is not being served; of several, each with --flash
    #[arg(long, value_name = "PATH")]
    pub flash: Vec<PathBuf>,
}

#[derive(Clone, Debug, Args)]
pub struct PoolShow {
    #[command(flatten)]
    pub at: PoolAt,
    /// The state directory of `hearth serve`
    /// [default: /var/lib/hearth for root, $XDG_STATE_HOME/hearth for others]
    #[arg(long, value_name = "DIR", requires = "flash")]
    pub state_dir: Option<PathBuf>,
}

#[derive(Clone, Debug, Args)]
pub struct PoolImport {
    #[command(flatten)]
    pub show: PoolShow,
    /// Confirm on this host all that the pool names outside it: origins, directories, addresses to listen on, and
    /// clients. Until then nothing of that is used
    #[arg(long)]
    pub accept: bool,
}

#[derive(Clone, Debug, Args)]
pub struct PoolExport {
    #[command(flatten)]
    pub at: PoolAt,
    /// Yes, cut off clients that are connected
    #[arg(long)]
    pub yes: bool,
    /// The state directory of `hearth serve`
    /// [default: /var/lib/hearth for root, $XDG_STATE_HOME/hearth for others]
    #[arg(long, value_name = "DIR", requires = "flash")]
    pub state_dir: Option<PathBuf>,
}

/// Of which pool a flash device is added, replaced or removed, and how.
#[derive(Clone, Debug, Args)]
pub struct FlashWhere {
    /// The devices of a pool that is not being served, each with --flash; without it, the one being served
    #[arg(long, value_name = "PATH")]
    pub flash: Vec<PathBuf>,
    /// The state directory of `hearth serve`
    /// [default: /var/lib/hearth for root, $XDG_STATE_HOME/hearth for others]
    #[arg(long, value_name = "DIR", requires = "flash")]
    pub state_dir: Option<PathBuf>,
    /// Yes, also if clients have to connect again for it
    #[arg(long)]
    pub yes: bool,
}

/// The device that comes.
#[derive(Clone, Debug, Args)]
pub struct FlashNew {
    /// Make a new file of this size
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub size: Option<Size>,
    /// With --size: only reserve the space instead of writing the file once
    #[arg(long, requires = "size")]
    pub quick: bool,
    /// Overwrite what is there: a file system, a partition table, another pool, an existing file;
    /// and allow a file in RAM
    #[arg(long)]
    pub force: bool,
}

#[derive(Clone, Debug, Args)]
pub struct FlashAdd {
    /// Block device or file that is to be one more
    #[arg(value_name = "NEW")]
    pub new: PathBuf,
    #[command(flatten)]
    pub device: FlashNew,
    #[command(flatten)]
    pub at: FlashWhere,
}

#[derive(Clone, Debug, Args)]
pub struct FlashReplace {
    /// The device that goes, as `hearth pool show` lists it; one that is lost also by its UUID
    /// (`pool show --json`)
    #[arg(value_name = "OLD")]
    pub old: PathBuf,
    /// Block device or file that comes, at least as large
    #[arg(value_name = "NEW")]
    pub new: PathBuf,
    #[command(flatten)]
    pub device: FlashNew,
    #[command(flatten)]
    pub at: FlashWhere,
}

#[derive(Clone, Debug, Args)]
pub struct FlashRemove {
    /// The device that goes, as `hearth pool show` lists it; any but the first
    #[arg(value_name = "DEVICE", required_unless_present = "cancel")]
    pub old: Option<PathBuf>,
    /// Call off what is under way: a removal, a replacement or an addition
    #[arg(long, conflicts_with_all = ["old", "flash"])]
    pub cancel: bool,
    #[command(flatten)]
    pub at: FlashWhere,
}
