//! A pool from elsewhere that names everything it can name on this host.

use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixListener;
use std::path::Path;

use hearth_format::{CacheMode, DatastoreRecord, DiskRecord, Registry, Uuid};

use super::{StopReason, testing};
use crate::api::datastores::DatastoreSet;
use crate::api::server::Control;
use crate::api::types::{DiskSet, DiskState, Trust};
use crate::error::Kind;
use crate::pool::{CreateOptions, Pool, create};

const SIZE: u64 = 16 << 20;

/// Everything below a directory, with what a write would change.
fn state_of(dir: &Path) -> Vec<String> {
    let mut all: Vec<String> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            let meta = entry.metadata().unwrap();
            format!("{:?} {:?} {:?}", entry.path(), meta.len(), meta.modified())
        })
        .collect();
    all.sort();
    all
}

/// Files below a directory that this process has open.
fn open_below(dir: &Path) -> Vec<std::path::PathBuf> {
    let fds = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let open = fds.filter_map(|fd| std::fs::read_link(fd.path()).ok());
    open.filter(|path| path.starts_with(dir)).collect()
}

#[test]
fn foreign_pool_reaches_nothing_until_accepted() {
    let dir = tempfile::tempdir().unwrap();
    let host = tempfile::tempdir().unwrap();
    let at = |name: &str| host.path().join(name).display().to_string();
    for name in ["victim", "secret", "leg0", "leg1", "image"] {
        let file = std::fs::File::create(at(name)).unwrap();
        file.set_len(SIZE).unwrap();
    }
    std::fs::create_dir(at("etc")).unwrap();
    std::fs::write(at("etc/shadow"), "root").unwrap();
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let socket = UnixListener::bind(at("socket")).unwrap();
    server.set_nonblocking(true).unwrap();
    socket.set_nonblocking(true).unwrap();
    // Free, as far as anybody can know.
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let nfs = free.local_addr().unwrap();
    drop(free);
    let leg = |name: &str| crate::origin::parse(&at(name)).unwrap();
    let mirror = hearth_origin::mirror(&[leg("leg0"), leg("leg1")]);
    let tcp = format!("nbd://{}/x", server.local_addr().unwrap());
    let unix = format!("nbd+unix:///x?socket={}", at("socket"));
    let origins = [
        ("victim", at("victim")),
        ("secret", at("secret")),
        ("mirror", mirror),
        ("tcp", tcp),
        ("unix", unix),
        ("image", format!("qcow2:{}", at("image"))),
    ];
    let flash = dir.path().join("flash");
    let options = CreateOptions {
        size: Some(64 << 20),
        ..CreateOptions::default()
    };
    create(&flash, &options).unwrap();
    let mut pool = Pool::open(&flash).unwrap();
    let claim_everything = |registry: &mut Registry| {
        for (id, (name, origin)) in (1..).zip(&origins) {
            let mirror = (*name == "mirror").then(|| crate::mirror::new_stamps(2));
            let record = DiskRecord {
                id,
                name: (*name).to_owned(),
                origin: origin.clone(),
                size: SIZE,
                mode: CacheMode::WriteBack,
                read_only: *name == "secret",
                // Rules of before there were any: the image may name any file.
                rules: if *name == "image" { 0 } else { 2 },
                sole_user: true,
                serial: Uuid::from_u128(id.into()),
                mirror,
                ..DiskRecord::default()
            };
            registry.disks.push(record.into());
        }
        let record = DatastoreRecord {
            name: "all".to_owned(),
            directory: at("etc"),
            serial: Uuid::from_u128(99),
            listen: format!("0.0.0.0:{}", nfs.port()),
            clients: vec!["0.0.0.0/0=rw,root".to_owned()],
            ..DatastoreRecord::default()
        };
        registry.put_datastore(&record).unwrap();
        Ok(())
    };
    pool.change(claim_everything).unwrap();
    drop(pool);
    let before = [state_of(host.path()), state_of(Path::new(&at("etc")))];
    let nothing_is_used = |daemon: &std::sync::Arc<super::Daemon>| {
        daemon.open_datastores();
        assert_eq!(open_below(host.path()), Vec::<std::path::PathBuf>::new());
        assert_eq!(server.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
        assert_eq!(socket.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
        assert!(TcpStream::connect(nfs).is_err());
        let after = [state_of(host.path()), state_of(Path::new(&at("etc")))];
        assert_eq!(after, before);
        let info = daemon.pool().unwrap();
        assert_eq!(info.claims.len(), origins.len() + 1);
        assert!(info.claims.iter().all(|c| !c.confirmed), "{info:?}");
        for (name, origin) in &origins {
            let disk = daemon.disk(name).unwrap();
            assert_eq!(disk.state, DiskState::Refused, "{disk:?}");
            assert!(disk.reason.unwrap().contains(origin));
            assert!(disk.remedy.unwrap().contains("pool import --accept"));
        }
        let store = daemon.datastore("all").unwrap();
        assert!(!store.served && store.remedy.unwrap().contains("pool import --accept"));
    };
    // Nor by whoever looks at the pool.
    let shown = crate::pool::show(&[flash], &dir.path().join("state")).unwrap();
    assert!(shown.disks.iter().all(|disk| !disk.origin_found));
    let daemon = testing::start(dir.path());
    nothing_is_used(&daemon);
    // Nor by commands that name something else.
    let set = |set: DiskSet| daemon.set("victim", set).unwrap_err();
    let trust = DiskSet {
        trust: Some(Trust::Origin),
        ..DiskSet::default()
    };
    assert_eq!(set(trust).kind, Kind::Refused);
    let below = DiskSet {
        allow_backing: true,
        ..DiskSet::default()
    };
    assert_eq!(daemon.set("image", below).unwrap_err().kind, Kind::Refused);
    let narrow = DatastoreSet {
        read_only: Some(true),
        ..DatastoreSet::default()
    };
    assert!(!daemon.set_datastore("all", narrow).unwrap().served);
    nothing_is_used(&daemon);
    daemon.shut_down(StopReason::Signal).unwrap();
    drop(daemon);
    // The state directory knows the pool now, and nothing of it is confirmed for that.
    let daemon = testing::start(dir.path());
    nothing_is_used(&daemon);
    let added = testing::disk(dir.path(), "own");
    assert_eq!(daemon.add(added).unwrap().state, DiskState::Attached);

    // From here on the servers refuse; who connects to a silent one would hold the daemon.
    drop((server, socket));
    let info = daemon.accept_claims().unwrap();
    assert!(info.claims.iter().all(|c| c.confirmed), "{info:?}");
    let is_served = |daemon: &super::Daemon| {
        let state = |name| daemon.disk_info(name).unwrap().state;
        for name in ["victim", "secret", "own"] {
            assert_eq!(state(name), DiskState::Attached, "{name}");
        }
        assert!(daemon.datastore_info("all").unwrap().served);
        TcpStream::connect(nfs).unwrap();
    };
    is_served(&daemon);
    daemon.close_datastores();
    daemon.shut_down(StopReason::Signal).unwrap();
    drop(daemon);
    let daemon = testing::start(dir.path());
    daemon.open_datastores();
    is_served(&daemon);
    daemon.close_datastores();
    daemon.shut_down(StopReason::Signal).unwrap();
    drop(daemon);
}

/// Has no claims of a pool stored in the state directory, until what is returned is removed.
fn full(dir: &Path) -> std::path::PathBuf {
    let pool = Pool::look(&dir.join("flash")).unwrap().uuid();
    let in_the_way = dir.join("state/claims").join(pool).with_extension("new");
    std::fs::create_dir_all(&in_the_way).unwrap();
    use std::os::unix::fs::PermissionsExt;
    for private in ["state", "state/claims"] {
        let mode = std::fs::Permissions::from_mode(0o700);
        std::fs::set_permissions(dir.join(private), mode).unwrap();
    }
    in_the_way
}

/// An upgrade while the state directory is full: what an earlier version served stays, and is noted with the next change.
#[test]
fn claims_that_cannot_be_stored_count_and_are_stored_later() {
    let (dir, daemon) = testing::with_disk("a");
    daemon.shut_down(StopReason::Signal).unwrap();
    drop(daemon);
    std::fs::remove_dir_all(dir.path().join("state/claims")).unwrap();
    let in_the_way = full(dir.path());
    let state = |daemon: &super::Daemon, name: &str| daemon.disk_info(name).unwrap().state;
    let daemon = testing::start(dir.path());
    assert_eq!(state(&daemon, "a"), DiskState::Attached);
    let refused = daemon.add(testing::disk(dir.path(), "b")).unwrap_err();
    assert_eq!(refused.kind, Kind::Unavailable, "{refused}");
    std::fs::remove_dir(in_the_way).unwrap();
    daemon.add(testing::disk(dir.path(), "b")).unwrap();
    daemon.shut_down(StopReason::Signal).unwrap();
    drop(daemon);
    let daemon = testing::start(dir.path());
    for name in ["a", "b"] {
        assert_eq!(state(&daemon, name), DiskState::Attached, "{name}");
    }
    daemon.shut_down(StopReason::Signal).unwrap();
}

/// A foreign pool must not look like one of this host at the second start.
#[test]
fn foreign_pool_over_a_full_state_directory_stays_unconfirmed() {
    let (dir, daemon) = testing::with_disk("a");
    daemon.shut_down(StopReason::Signal).unwrap();
    drop(daemon);
    std::fs::remove_dir_all(dir.path().join("state")).unwrap();
    let in_the_way = full(dir.path());
    let state = |daemon: &super::Daemon| daemon.disk_info("a").unwrap().state;
    for first in [true, false] {
        let daemon = testing::start(dir.path());
        assert_eq!(state(&daemon), DiskState::Refused);
        daemon.shut_down(StopReason::Signal).unwrap();
        drop(daemon);
        if first {
            std::fs::remove_dir(&in_the_way).unwrap();
        }
    }
}

/// A pool of this host, as the version before kept it.
#[test]
fn pool_of_an_earlier_version_stays_confirmed() {
    let (dir, daemon) = testing::with_disk("a");
    daemon.shut_down(StopReason::Signal).unwrap();
    drop(daemon);
    let claims = dir.path().join("state/claims");
    std::fs::remove_dir_all(&claims).unwrap();
    let attached = |daemon: &super::Daemon| daemon.disk_info("a").unwrap().state;
    let daemon = testing::start(dir.path());
    assert_eq!(attached(&daemon), DiskState::Attached);
    daemon.shut_down(StopReason::Signal).unwrap();
    drop(daemon);
    // That is noted once: what comes from elsewhere later is not taken for it.
    assert!(claims.read_dir().unwrap().count() == 1);
    let mut pool = Pool::open(&dir.path().join("flash")).unwrap();
    let elsewhere = |registry: &mut Registry| {
        registry.by_id_mut(1).unwrap().read_only = true;
        Ok(())
    };
    pool.change(elsewhere).unwrap();
    drop(pool);
    let daemon = testing::start(dir.path());
    assert_eq!(attached(&daemon), DiskState::Refused);
    daemon.shut_down(StopReason::Signal).unwrap();
    drop(daemon);
}
