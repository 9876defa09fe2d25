//! `hearth names`: the names of disks and datastores, one a line. Completions of shells ask for them at each press of the tab
//! key, so nothing is said if there is no daemon.

use hearth_daemon::api::datastores::DatastoreInfo;
use hearth_daemon::api::types::DiskInfo;
use hearth_daemon::client::Client;

use crate::args::{Global, Named, Names};
use crate::{Outcome, print_json};

pub fn run(global: &Global, args: &Names) -> Outcome {
    let client = Client::new(&global.dir());
    let mut names: Vec<String> = Vec::new();
    if args.kind != Named::Datastore {
        let disks: Vec<DiskInfo> = client.get("/v1/disks").unwrap_or_default();
        names.extend(disks.into_iter().map(|disk| disk.name));
    }
    if args.kind != Named::Disk {
        let stores: Vec<DatastoreInfo> = client.get("/v1/datastores").unwrap_or_default();
        names.extend(stores.into_iter().map(|store| store.name));
    }
    if global.json {
        return print_json(&names);
    }
    names.iter().for_each(|name| println!("{name}"));
    Ok(())
}
