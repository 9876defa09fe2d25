//! The grammar of `hearth disk`.

use clap::{Args, Subcommand, ValueEnum};
use hearth_daemon::api::types::{CacheMode, Trust};

use super::{Settings, Size, parse_size};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// Writes complete on flash and reach the origin later
    WriteBack,
    /// Writes complete on the origin; the flash copy is renewed
    WriteThrough,
    /// Reads are cached; writes go to the origin
    WriteAround,
    /// Pass-through
    Off,
    /// As write-back, and the origin gets it in the order of the guest's flushes
    WriteBackOrdered,
}

impl From<Mode> for CacheMode {
    fn from(mode: Mode) -> CacheMode {
        match mode {
            Mode::WriteBack => CacheMode::WriteBack,
            Mode::WriteThrough => CacheMode::WriteThrough,
            Mode::WriteAround => CacheMode::WriteAround,
            Mode::Off => CacheMode::Off,
            Mode::WriteBackOrdered => CacheMode::WriteBackOrdered,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Side {
    /// The dirty blocks on flash are written over the origin
    Flash,
    /// The dirty blocks are thrown away
    Origin,
}

impl From<Side> for Trust {
    fn from(side: Side) -> Trust {
        match side {
            Side::Flash => Trust::Flash,
            Side::Origin => Trust::Origin,
        }
    }
}

#[derive(Debug, Subcommand)]
pub enum Disk {
    /// Put a disk behind the cache; its data stays as it is
    #[command(
        after_help = "Example:\n  hearth disk add vm1 --origin /srv/vm1.raw\n  \
        hearth disk add db --origin /dev/vg0/db --mode write-through --block-size 16K --max 50G\n  \
        hearth disk add shop --origin /dev/vg0/shop --mode write-back-ordered --max-age 30s\n  \
        hearth disk add old --origin qcow2:/srv/old.qcow2\n  \
        hearth disk add clone --origin qcow2:/srv/clone.qcow2 --allow-backing\n  \
        hearth disk add swap --flash-only 8G --scratch\n  \
        hearth disk add web --mirror /dev/sdb --mirror /dev/sdc\n  \
        hearth disk add mail --origin nbd://storage1/mail --sole-user --origin-timeout 60"
    )]
    Add(DiskAdd),
    /// List the disks
    #[command(after_help = "Example:\n  hearth disk list")]
    List,
    /// Show one disk
    #[command(after_help = "Example:\n  hearth disk show vm1")]
    Show(DiskName),
    /// Change settings while the disk is in use
    #[command(
        after_help = "Example:\n  hearth disk set vm1 --mode write-through\n  \
        hearth disk set vm1 --pin\n  hearth disk set vm1 --size-from-origin\n  hearth disk set vm1 --trust flash"
    )]
    Set(DiskSet),
    /// Write everything dirty to the origin; Ctrl-C calls it off
    #[command(
        after_help = "Example:\n  hearth disk flush vm1\n  hearth disk flush --all\n  \
        hearth disk flush vm1 --hold; cp /srv/vm1.raw /backup/; hearth disk set vm1 --hold off"
    )]
    Flush(DiskFlush),
    /// Flush a disk and forget it; the origin is the disk again. Ctrl-C calls it off
    #[command(after_help = "Example:\n  hearth disk remove vm1\n  hearth disk remove vm1 --yes")]
    Remove(DiskRemove),
    /// Make a disk a mirror, change the legs of one, or how they are copied to, while it is in use
    #[command(after_help = "Example:\n  hearth disk mirror vm1 --add /dev/sdd\n  \
        hearth disk mirror vm1 --remove /dev/sdb\n  hearth disk mirror vm1 --rate 50M")]
    Mirror(DiskMirror),
    /// Copy a mirrored disk to another leg, and take the old one out when it is there; Ctrl-C takes the new one out again
    #[command(after_help = "Example:\n  hearth disk replace vm1 /dev/sdb /dev/sdd")]
    Replace(DiskReplace),
    /// Compare the legs of a mirrored disk with one another and with what is cached, and repair where something tells
    /// what is right; Ctrl-C leaves it going on
    #[command(
        after_help = "Example:\n  hearth disk scrub vm1\n  hearth disk scrub vm1 --rate 100M --no-wait\n  \
        hearth disk scrub vm1 --show\n  hearth disk scrub vm1 --prefer /dev/sdb\n  hearth disk scrub vm1 --cancel\n  \
        hearth disk scrub vm1 --every 7"
    )]
    Scrub(DiskScrub),
    /// Give a disk that lives on flash an origin, or have one with an origin live on flash alone, while it is in use; what is lacking
    /// there is written in the background
    #[command(
        after_help = "Example:\n  hearth disk move db --origin /srv/db.raw\n  hearth disk move vm1 --flash-only"
    )]
    Move(DiskMove),
    /// Give up ranges whose only copy was lost with the flash
    #[command(after_help = "Example:\n  hearth disk accept-loss vm1")]
    AcceptLoss(DiskName),
    /// Empty a scratch disk without clients; blocks that a crash made unreadable read as zeros again
    #[command(after_help = "Example:\n  hearth disk reset swap1")]
    Reset(DiskName),
}

#[derive(Clone, Debug, Args)]
pub struct DiskFlush {
    /// The disk
    #[arg(value_name = "NAME", required_unless_present = "all")]
    pub name: Option<String>,
    /// All disks that are served, one after another
    #[arg(long, conflicts_with = "name")]
    pub all: bool,
    /// From now on the origin has every write before it is answered, until `hearth disk set NAME --hold off`
    #[arg(long)]
    pub hold: bool,
}

#[derive(Clone, Debug, Args)]
pub struct DiskName {
    /// The disk
    #[arg(value_name = "NAME")]
    pub name: String,
}

// The group is that of `Users`: as many of it as one likes, or none.
#[derive(Clone, Debug, Args)]
#[command(group = clap::ArgGroup::new("change").multiple(true))]
pub struct DiskAdd {
    /// Name of the disk, and of its NBD export
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Where the disk's data is: a file, a block device, an image as FORMAT:PATH or an NBD export (docs/origins.md)
    #[arg(long, value_name = "ORIGIN", required_unless_present_any = ["mirror", "flash_only"])]
    pub origin: Option<String>,
    /// No origin: a disk of this size whose data is on flash and nowhere else (docs/flash-only.md)
    #[arg(long, value_name = "SIZE", value_parser = parse_size, conflicts_with_all = ["origin", "mirror"])]
    pub flash_only: Option<Size>,
    /// With --flash-only: a crash loses the contents of the disk, and nothing waits for flash to be flushed
    #[arg(long, requires = "flash_only")]
    pub scratch: bool,
    /// One of several places that each hold all of the disk's data; give two or more. The first one holds it, the
    /// others are overwritten (docs/mirrors.md)
    #[arg(long, value_name = "ORIGIN", conflicts_with = "origin")]
    pub mirror: Vec<String>,
    #[command(flatten)]
    pub settings: Settings<true>,
    #[command(flatten)]
    pub users: Users,
    /// The image may name other files of this host (a backing file, a data file, extents), as far as
    /// they lie beside it or in a --backing-dir of the daemon
    #[arg(long)]
    pub allow_backing: bool,
}

#[derive(Clone, Debug, Args)]
#[command(group = clap::ArgGroup::new("change").required(true).multiple(true))]
pub struct DiskSet {
    /// The disk
    #[arg(value_name = "NAME")]
    pub name: String,
    #[command(flatten)]
    pub settings: Settings<false>,
    /// No longer have all of it on flash: the same as --pin off
    #[arg(long, group = "change", conflicts_with = "pin")]
    pub no_pin: bool,
    /// Of a disk that lives on flash: its new size, not smaller than before
    #[arg(long, group = "change", value_name = "SIZE", value_parser = parse_size)]
    pub size: Option<Size>,
    /// The origin has grown: take over its size
    #[arg(long, group = "change")]
    pub size_from_origin: bool,
    /// The image may name the other files of this host that it names now
    #[arg(long, group = "change")]
    pub allow_backing: bool,
    /// The origin was changed while dirty blocks waited: which side wins
    #[arg(long, group = "change", value_enum, value_name = "SIDE")]
    pub trust: Option<Side>,
    #[command(flatten)]
    pub users: Users,
}

/// Who uses a disk and its origin.
#[derive(Clone, Debug, Args)]
pub struct Users {
    /// Nobody but this pool writes the origin: for origins where that cannot be seen (nbd, iscsi, ssh, nfs://)
    #[arg(long, group = "change")]
    pub sole_user: bool,
    /// Take the origin from the pool that owns it, if that shows no sign of life; needs --yes
    #[arg(long, group = "change")]
    pub takeover: bool,
    /// Yes, what that pool had not written back may be missing
    #[arg(long, requires = "takeover")]
    pub yes: bool,
}

#[derive(Clone, Debug, Args)]
#[command(group = clap::ArgGroup::new("change").required(true).multiple(true))]
pub struct DiskMirror {
    /// The disk
    #[arg(value_name = "NAME")]
    pub name: String,
    /// A new leg; all of it is overwritten
    #[arg(long, group = "change", value_name = "ORIGIN")]
    pub add: Option<String>,
    /// A leg that goes for good
    #[arg(long, group = "change", value_name = "ORIGIN")]
    pub remove: Option<String>,
    /// Copy no more to legs that lack something, until --resume
    #[arg(long, group = "change", conflicts_with = "resume")]
    pub pause: bool,
    /// Go on copying
    #[arg(long, group = "change")]
    pub resume: bool,
    /// Copy at most so many bytes a second; 0: no limit
    #[arg(long, group = "change", value_name = "SIZE", value_parser = parse_size)]
    pub rate: Option<Size>,
}

#[derive(Clone, Debug, Args)]
pub struct DiskReplace {
    /// The disk
    #[arg(value_name = "NAME")]
    pub name: String,
    /// The leg that goes
    #[arg(value_name = "OLD")]
    pub old: String,
    /// The one in its place; all of it is overwritten
    #[arg(value_name = "NEW")]
    pub new: String,
}

#[derive(Clone, Debug, Args)]
pub struct DiskMove {
    /// The disk
    #[arg(value_name = "NAME")]
    pub name: String,
    /// A file that does not exist, which is made, or one that is as large as the disk and has no data (`truncate -s`)
    #[arg(long, value_name = "PATH", required_unless_present = "flash_only")]
    pub origin: Option<String>,
    /// On flash alone; its origin is left as it is then, and gets old
    #[arg(long, conflicts_with = "origin")]
    pub flash_only: bool,
}

#[derive(Clone, Debug, Args)]
pub struct DiskScrub {
    /// The disk
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Call off the scrub that goes on; the next one goes on where it was
    #[arg(long, group = "what")]
    pub cancel: bool,
    /// Begin at the start, whatever a scrub that was called off has done
    #[arg(long, group = "what")]
    pub anew: bool,
    /// Where legs were found to differ and nothing tells which one is right, it is this one; the others are overwritten there
    #[arg(long, group = "what", value_name = "LEG")]
    pub prefer: Option<String>,
    /// Say what the scrub that goes on, or the last one, has found
    #[arg(long, group = "what")]
    pub show: bool,
    /// Scrub every so many days, such as 7d; 0: only when asked for
    #[arg(long, group = "what", value_name = "DAYS", value_parser = super::trace::parse_days)]
    pub every: Option<u32>,
    /// Compare at most so many bytes of the disk a second; 0: no limit
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub rate: Option<Size>,
    /// Do not wait until it is through
    #[arg(long)]
    pub no_wait: bool,
}

#[derive(Clone, Debug, Args)]
pub struct DiskRemove {
    /// The disk
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Throw dirty blocks away instead of writing them to the origin; needs --yes
    #[arg(long, visible_alias = "force")]
    pub discard_dirty: bool,
    /// Yes, cut off clients that are connected; with --discard-dirty, lose the newest writes
    #[arg(long)]
    pub yes: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// Yes
    On,
    /// No
    Off,
}
