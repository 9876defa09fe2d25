//! The grammar of `hearth datastore`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use hearth_daemon::api::datastores::DatastoreClient;

use super::Switch;

#[derive(Debug, Subcommand)]
pub enum Datastore {
    /// Serve a directory of virtual machines over NFS; everything in it stays as it is
    #[command(after_help = "Example:\n  hearth datastore add /srv/vms --nfs\n  \
        hearth datastore add /srv/vms --nfs --listen 192.0.2.1 --client 192.0.2.10=rw,root\n  \
        hearth datastore add /srv/isos --nfs --name iso --client 192.0.2.0/24=ro")]
    Add(DatastoreAdd),
    /// List the datastores
    #[command(after_help = "Example:\n  hearth datastore list")]
    List,
    /// Show one datastore
    #[command(after_help = "Example:\n  hearth datastore show vms")]
    Show(DatastoreName),
    /// Change who may use a datastore, and where, while it is in use
    #[command(
        after_help = "Example:\n  hearth datastore set vms --client 192.0.2.10=rw,root --client 192.0.2.11=rw,root\n  \
        hearth datastore set vms --read-only on"
    )]
    Set(DatastoreSet),
    /// Write everything to the directory that is only on flash
    #[command(after_help = "Example:\n  hearth datastore flush vms\n  \
        hearth datastore flush vms --hold; tar -cf /backup/vms.tar /srv/vms; hearth datastore set vms --hold off")]
    Flush(DatastoreFlush),
    /// Flush a datastore and serve it no longer; the directory is what it was
    #[command(after_help = "Example:\n  hearth datastore remove vms")]
    Remove(DatastoreName),
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
pub struct DatastoreAdd {
    /// The directory
    #[arg(value_name = "DIRECTORY")]
    pub directory: PathBuf,
    /// Serve it over NFS version 3
    #[arg(long, required = true)]
    pub nfs: bool,
    /// Name of the datastore; clients mount it as /NAME [default: the directory's own]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Where to listen [default: 127.0.0.1:2049]
    #[arg(long, value_name = "ADDRESS[:PORT]")]
    pub listen: Option<String>,
    /// Who may come, and how: rw (if nothing is said) or ro, and root if root is not to count as
    /// nobody; may be given several times [default: this host, rw]
    #[arg(long = "client", value_name = "NETWORK[=rw|ro][,root]")]
    pub clients: Vec<DatastoreClient>,
    /// Nobody may change anything
    #[arg(long)]
    pub read_only: bool,
}

#[derive(Clone, Debug, Args)]
#[command(group = clap::ArgGroup::new("change").required(true).multiple(true))]
pub struct DatastoreSet {
    /// The datastore
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Where to listen; clients have to mount it anew
    #[arg(long, value_name = "ADDRESS[:PORT]", group = "change")]
    pub listen: Option<String>,
    /// Who may come from now on, as with add; those that are not named may no longer
    #[arg(
        long = "client",
        value_name = "NETWORK[=rw|ro][,root]",
        group = "change"
    )]
    pub clients: Vec<DatastoreClient>,
    /// Whether nobody may change anything
    #[arg(long, value_enum, group = "change")]
    pub read_only: Option<Switch>,
    /// Whether the directory has every write before it is answered, as with flush --hold
    #[arg(long, value_enum, group = "change")]
    pub hold: Option<Switch>,
}
