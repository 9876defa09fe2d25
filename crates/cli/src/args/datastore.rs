//! The grammar of `hearth datastore`.

use std::path::PathBuf;

use clap::builder::PossibleValue;
use clap::{Args, Subcommand, ValueEnum};
use hearth_daemon::api::datastores::DatastoreClient;
use hearth_daemon::api::types::CacheMode;

use super::{Mode, Size, Switch, parse_size};

/// Those that a file can have: none is ordered, for what a guest's flushes are is not known of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileMode(Mode);

impl ValueEnum for FileMode {
    fn value_variants<'a>() -> &'a [FileMode] {
        const OF_FILES: [FileMode; 4] = [
            FileMode(Mode::WriteBack),
            FileMode(Mode::WriteThrough),
            FileMode(Mode::WriteAround),
            FileMode(Mode::Off),
        ];
        &OF_FILES
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        self.0.to_possible_value()
    }
}

impl From<FileMode> for CacheMode {
    fn from(FileMode(mode): FileMode) -> CacheMode {
        mode.into()
    }
}

#[derive(Debug, Subcommand)]
pub enum Datastore {
    /// Serve a directory of virtual machines over NFS; everything in it stays as it is
    #[command(after_help = "Example:\n  hearth datastore add /srv/vms --nfs\n  \
        hearth datastore add /srv/vms --nfs --listen 192.0.2.1 --client 192.0.2.10=rw,no_root_squash\n  \
        hearth datastore add /srv/isos --nfs --name iso --client 192.0.2.0/24=ro\n  \
        hearth datastore add vms --mirror /mnt/a/vms --mirror /mnt/b/vms --nfs")]
    Add(DatastoreAdd),
    /// List the datastores
    #[command(after_help = "Example:\n  hearth datastore list")]
    List,
    /// Show one datastore
    #[command(after_help = "Example:\n  hearth datastore show vms")]
    Show(DatastoreName),
    /// List the files that are cached, with what was counted of each
    #[command(
        after_help = "Example:\n  hearth datastore files vms\n  hearth datastore files vms --json"
    )]
    Files(DatastoreName),
    /// Change who may use a datastore, where, and how its files are cached, while it is in use
    #[command(
        after_help = "Example:\n  hearth datastore set vms --client 192.0.2.10=rw,no_root_squash --client 192.0.2.11=rw,no_root_squash\n  \
        hearth datastore set vms --read-only on\n  \
        hearth datastore set vms --match '*.iso' --mode write-around --max 4G\n  \
        hearth datastore set vms --match 'database/*' --mode write-through --seq-cutoff 0\n  \
        hearth datastore set vms --match 'web/*' --pin\n  \
        hearth datastore set vms --match '*.vswp' --scratch\n  \
        hearth datastore set vms --unmatch '*.iso'"
    )]
    Set(DatastoreSet),
    /// Write everything to the directory that is only on flash
    #[command(after_help = "Example:\n  hearth datastore flush vms\n  \
        hearth datastore flush vms --hold; tar -cf /backup/vms.tar /srv/vms; hearth datastore set vms --hold off")]
    Flush(DatastoreFlush),
    /// Compare the two directories of a mirrored datastore in use, and repair the differences that can be decided
    #[command(
        after_help = "Example:\n  hearth datastore scrub vms\n  hearth datastore scrub vms --rate 100M --no-wait\n  \
        hearth datastore scrub vms --show\n  hearth datastore scrub vms --prefer /mnt/a/vms\n  \
        hearth datastore scrub vms --every 7"
    )]
    Scrub(DatastoreScrub),
    /// Flush a datastore and serve it no longer; the directory is what it was
    #[command(after_help = "Example:\n  hearth datastore remove vms")]
    Remove(DatastoreRemove),
}

#[derive(Clone, Debug, Args)]
pub struct DatastoreRemove {
    /// The datastore
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Also while clients use it: what they have open becomes stale
    #[arg(long)]
    pub yes: bool,
}

#[derive(Clone, Debug, Args)]
pub struct DatastoreName {
    /// The datastore
    #[arg(value_name = "NAME")]
    pub name: String,
}

#[derive(Clone, Debug, Args)]
pub struct DatastoreFlush {
    /// The datastore
    #[arg(value_name = "NAME")]
    pub name: String,
    /// From now on the directory has every write before it is answered, until `hearth datastore set NAME --hold off`
    #[arg(long)]
    pub hold: bool,
}

#[derive(Clone, Debug, Args)]
pub struct DatastoreScrub {
    /// The datastore
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Cancel the scrub under way; the next one continues where it was
    #[arg(long, group = "what")]
    pub cancel: bool,
    /// Begin at the start, although a cancelled scrub could continue
    #[arg(long, group = "what")]
    pub anew: bool,
    /// Where a scrub found that the directories differ and nothing shows which one is right, it is this one; the other
    /// is overwritten there
    #[arg(long, group = "what", value_name = "DIR")]
    pub prefer: Option<PathBuf>,
    /// Print the result of the scrub under way or the last one
    #[arg(long, group = "what")]
    pub show: bool,
    /// Scrub every DAYS days, such as 7d; 0: only on request
    #[arg(long, group = "what", value_name = "DAYS", value_parser = super::trace::parse_days)]
    pub every: Option<u32>,
    /// Compare at most SIZE bytes a second; 0: no limit
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub rate: Option<Size>,
    /// Do not wait for its end
    #[arg(long)]
    pub no_wait: bool,
}

#[derive(Clone, Debug, Args)]
pub struct DatastoreAdd {
    /// The directory; with --mirror, the datastore's name
    #[arg(value_name = "DIRECTORY")]
    pub directory: PathBuf,
    /// One of two directories that are to hold the same, so that either may be lost: given twice. What is in the first
    /// counts, the second has to be empty
    #[arg(long = "mirror", value_name = "DIR", conflicts_with = "name")]
    pub mirrors: Vec<PathBuf>,
    /// Serve it over NFS version 3
    #[arg(long, required = true)]
    pub nfs: bool,
    /// Name of the datastore; clients mount it as /NAME [default: the directory's own]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Where to listen [default: 127.0.0.1:2049]
    #[arg(long, value_name = "ADDRESS[:PORT]")]
    pub listen: Option<String>,
    /// Who may come, and how; may be given several times [default: this host, rw]. The options are those of exports(5):
    /// rw (default) or ro; root_squash (default): root is mapped to the anonymous user, or
    /// no_root_squash, which ESXi needs; all_squash: all users are mapped to it; anonuid=UID and anongid=GID: the
    /// anonymous user (65534); secure (default): calls from this host need a privileged source port, or insecure
    #[arg(long = "client", value_name = "NETWORK[=OPTION,...]")]
    pub clients: Vec<DatastoreClient>,
    /// Nobody may change anything
    #[arg(long)]
    pub read_only: bool,
}

#[derive(Clone, Debug, Args)]
#[command(group = clap::ArgGroup::new("change").required(true).multiple(true))]
#[command(group = clap::ArgGroup::new("rule").multiple(true))]
pub struct DatastoreSet {
    /// The datastore
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Where to listen; clients have to mount it anew
    #[arg(long, value_name = "ADDRESS[:PORT]", group = "change")]
    pub listen: Option<String>,
    /// Who may come from now on, as with add; those that are not named may no longer
    #[arg(long = "client", value_name = "NETWORK[=OPTION,...]", group = "change")]
    pub clients: Vec<DatastoreClient>,
    /// Whether nobody may change anything
    #[arg(long, value_enum, group = "change")]
    pub read_only: Option<Switch>,
    /// Whether the directory has every write before it is answered, as with flush --hold
    #[arg(long, value_enum, group = "change")]
    pub hold: Option<Switch>,
    /// Files whose names are like this get the settings given beside it; with a /, files whose paths in the datastore
    /// are. Of several that fit, the last given holds
    #[arg(
        long = "match",
        value_name = "PATTERN",
        group = "change",
        requires = "rule"
    )]
    pub pattern: Option<String>,
    /// The settings given for this pattern hold no longer
    #[arg(
        long,
        value_name = "PATTERN",
        group = "change",
        conflicts_with = "pattern"
    )]
    pub unmatch: Option<String>,
    /// Cache mode of these files
    #[arg(long, value_enum, group = "rule", requires = "pattern")]
    pub mode: Option<FileMode>,
    /// Unit in which their misses are filled, 4K to 1M
    #[arg(long, value_name = "SIZE", value_parser = parse_size, group = "rule", requires = "pattern")]
    pub block_size: Option<Size>,
    /// Most flash each of them may use; 0 for no limit
    #[arg(long, value_name = "SIZE", value_parser = parse_size, group = "rule", requires = "pattern")]
    pub max: Option<Size>,
    /// Sequential reads of them longer than this are not cached; 0 caches all
    #[arg(long, value_name = "SIZE", value_parser = parse_size, group = "rule", requires = "pattern")]
    pub seq_cutoff: Option<Size>,
    /// Have all of them on flash: what is missing is read in, in the background, and stays
    #[arg(long, value_enum, num_args = 0..=1, require_equals = true, default_missing_value = "on", group = "rule", requires = "pattern")]
    pub pin: Option<Switch>,
    /// Have them on flash alone, and empty after a crash: swap of virtual machines. It holds for files that are made from now
    /// on, or have nothing in them yet
    #[arg(long, value_enum, num_args = 0..=1, require_equals = true, default_missing_value = "on", group = "rule", requires = "pattern")]
    pub scratch: Option<Switch>,
}
