//! Disks, and the journal of their registry.

use super::{block, device, hex, pool};
use hearth_format::datastore::DatastoreRecord;
use hearth_format::disk::OriginIdentity;
use hearth_format::journal::{Change, JournalEntry};
use hearth_format::registry::{Front, Moved};
use hearth_format::{CacheMode, DiskRecord, Home, OnStart, Registry, Uuid};

const REGISTRY: &[&str] = &[
    "4852454773e30a4d101112131415161718191a1b1c1d1e1f0600000000000000",
    "d000000002000000000000000400000000000000000000000000000000000000",
    "01000000be00000001000200030002000400766d2d310300120066696c653a2f",
    "7372762f766d2d312e696d670400080000000040000000000500010002060004",
    "0000000100070008000010000000000000080008000020000000000000090008",
    "0000001000000000000a000100010b00080037000000000000000c001000a0a1",
    "a2a3a4a5a6a7a8a9aaabacadaeaf0d0028000000004000000000ffffffffffff",
    "ffff0200000000000000030000000000000004000000000000000e0001000163",
    "0003006e657707000000020000006f6b",
];

#[test]
fn registry() {
    let disk = DiskRecord {
        id: 3,
        name: "vm-1".to_owned(),
        origin: "file:/srv/vm-1.img".to_owned(),
        size: 1 << 30,
        mode: CacheMode::WriteThrough,
        block_size: 65536,
        min_bytes: 4096,
        max_bytes: 8192,
        seq_cutoff: 1 << 20,
        read_only: true,
        since_seq: 55,
        serial: device(),
        origin_identity: Some(OriginIdentity {
            size: 1 << 30,
            mtime_ns: -1,
            ctime_ns: 2,
            dev: 3,
            inode: 4,
        }),
        clean_detach: true,
        auto: false,
        origin_timeout_ms: 0,
        rules: 0,
        sole_user: false,
        allow_backing: false,
        chain: Vec::new(),
        clients: 0,
        fenced_at: 0,
        datastore: String::new(),
        mirror: None,
        home: Home::Origin,
        max_age_ms: 0,
        pin: false,
        on_start: OnStart::Sample,
        device: String::new(),
        hold: false,
        void: false,
        unknown: vec![(99, b"new".to_vec())],
    };
    let registry = Registry {
        generation: 6,
        next_disk_id: 4,
        disks: vec![disk.into()],
        unknown_records: vec![(7, b"ok".to_vec())],
    };
    assert_eq!(registry.encode(pool()).unwrap(), block(REGISTRY));
    assert_eq!(
        Registry::decode(&block(REGISTRY), pool()).unwrap(),
        registry
    );
}

/// What a disk carries only if it is used: fields 17 to 22.
#[test]
fn terms_of_a_disk() {
    let plain = DiskRecord {
        id: 1,
        name: "a".to_owned(),
        origin: "/a".to_owned(),
        ..DiskRecord::default()
    };
    let disk = DiskRecord {
        rules: 1,
        sole_user: true,
        allow_backing: true,
        chain: vec!["/b".to_owned(), "/c".to_owned()],
        clients: 1,
        fenced_at: 0x6912_3456,
        datastore: String::new(),
        mirror: None,
        ..plain.clone()
    };
    let encode = |disk: &DiskRecord| {
        let registry = Registry {
            generation: 1,
            next_disk_id: 2,
            disks: vec![disk.clone().into()],
            unknown_records: Vec::new(),
        };
        registry.encode(pool()).unwrap()
    };
    let bytes = encode(&disk);
    let terms = hex("12000100011300010001110001000114000500\
         2f620a2f631500040001000000168008005634126900000000");
    assert!(bytes.windows(terms.len()).any(|window| window == terms));
    assert!(
        !encode(&plain)
            .windows(4)
            .any(|window| window == &terms[..4])
    );
    let back = Registry::decode(&bytes, pool()).unwrap();
    assert_eq!(back.disks, [disk.into()]);
}

/// Clients are kept as they are given on the command line, with the options of exports(5).
#[test]
fn datastore_clients_keep_their_options() {
    let record = DatastoreRecord {
        name: "vms".to_owned(),
        directory: "/srv".to_owned(),
        serial: Uuid::from_u128(7),
        listen: "127.0.0.1:2049".to_owned(),
        clients: vec![
            "192.0.2.7=rw,no_root_squash".to_owned(),
            "::1=ro,all_squash,insecure,anonuid=1000,anongid=1001".to_owned(),
        ],
        ..DatastoreRecord::default()
    };
    let bytes = record.encode().unwrap();
    assert_eq!(bytes, hex(&DATASTORE.concat()));
    assert_eq!(DatastoreRecord::decode(&bytes).unwrap(), record);
}

const DATASTORE: &[&str] = &[
    "01000300766d73020004002f7372760300100000000000000000000000000000",
    "00000704000e003132372e302e302e313a32303439050050003139322e302e32",
    "2e373d72772c6e6f5f726f6f745f7371756173680a3a3a313d726f2c616c6c5f",
    "7371756173682c696e7365637572652c616e6f6e7569643d313030302c616e6f",
    "6e6769643d313030310600010000",
];

const JOURNAL_ENTRY: &[&str] = &[
    "4852474a1dd53e31101112131415161706000000000000000700000000000000",
    "8a00000001000500000000000000000000000000000000000000000000000000",
    "0200000002000000030001000000780000000100020004000200010061030002",
    "002f610400080000000000000000000500010001060004000000000007000800",
    "0000000000000000080008000000000000000000090008000000000000000000",
    "0a000100000b00080000000000000000000c0010000000000000000000000000",
    "00000000000e0001",
];

const MOVED: &[&str] = &[
    "485245479233f45a101112131415161718191a1b1c1d1e1f0900000000000000",
    "0000000000000000020000000000000088130000000000002c01",
];

const BASE: &[&str] = &[
    "485245471af42627101112131415161718191a1b1c1d1e1f0600000000000000",
    "8000000001000000010000000500000000000000000000000000000000000000",
    "01000000780000000100020004000200010061030002002f6104000800000000",
    "0000000000050001000106000400000000000700080000000000000000000800",
    "080000000000000000000900080000000000000000000a000100000b00080000",
    "000000000000000c001000000000000000000000000000000000000e0001",
];

/// A disk with nothing set.
fn plain_disk() -> DiskRecord {
    DiskRecord {
        id: 4,
        name: "a".to_owned(),
        origin: "/a".to_owned(),
        ..DiskRecord::default()
    }
}

#[test]
fn journal_entry() {
    let entry = JournalEntry {
        base: 6,
        generation: 7,
        next_disk_id: 5,
        changes: vec![Change::Remove(3), Change::Put(plain_disk().into())],
    };
    let bytes = block(JOURNAL_ENTRY);
    assert_eq!(entry.encode(pool()).unwrap().unwrap(), bytes);
    assert_eq!(JournalEntry::decode(&bytes, pool()).unwrap(), entry);
}

#[test]
fn a_base_with_a_journal_and_the_note_of_a_move() {
    let registry = Registry {
        generation: 6,
        next_disk_id: 5,
        disks: vec![plain_disk().into()],
        unknown_records: Vec::new(),
    };
    assert_eq!(registry.encode_base(pool(), true).unwrap(), block(BASE));
    let front = Front::Base {
        registry,
        journal: true,
        blocks: 1,
    };
    assert_eq!(Front::decode(&block(BASE), pool()).unwrap(), front);
    let moved = Moved {
        generation: 9,
        start: 5000,
        blocks: 300,
    };
    assert_eq!(moved.encode(pool()), block(MOVED));
    assert_eq!(
        Front::decode(&block(MOVED), pool()).unwrap(),
        Front::Moved(moved)
    );
}

/// Field 25, the last one of a record.
#[test]
fn where_a_disk_lives() {
    let plain = DiskRecord {
        id: 1,
        name: "a".to_owned(),
        origin: "flash:a".to_owned(),
        ..DiskRecord::default()
    };
    let encode = |home| {
        let disk = DiskRecord {
            home,
            ..plain.clone()
        };
        let registry = Registry {
            generation: 1,
            next_disk_id: 2,
            disks: vec![disk.into()],
            unknown_records: Vec::new(),
        };
        let bytes = registry.encode(pool()).unwrap();
        let back = Registry::decode(&bytes, pool()).unwrap();
        assert_eq!(back, registry);
        bytes
    };
    let field = |bytes: &[u8]| {
        let at = bytes.windows(4).position(|w| w == [0x19, 0x80, 1, 0]);
        at.map(|at| bytes[at + 4])
    };
    assert_eq!(field(&encode(Home::Origin)), None);
    assert_eq!(field(&encode(Home::Flash)), Some(1));
    assert_eq!(field(&encode(Home::Scratch)), Some(2));
    assert_eq!(field(&encode(Home::Moving)), Some(3));
}

/// Field 27, and what follows from it.
#[test]
fn a_disk_that_is_to_be_all_on_flash() {
    let plain = DiskRecord {
        id: 1,
        name: "a".to_owned(),
        origin: "/a".to_owned(),
        size: 5000,
        min_bytes: 4096,
        ..DiskRecord::default()
    };
    assert_eq!(plain.kept_bytes(), 4096);
    let pinned = DiskRecord {
        pin: true,
        ..plain.clone()
    };
    assert_eq!(pinned.kept_bytes(), 8192, "whole blocks");
    let moving = DiskRecord {
        home: Home::Moving,
        ..pinned.clone()
    };
    assert_eq!(moving.kept_bytes(), 4096, "it is promised already");
    assert_eq!(moving.promised_bytes(), 5000);
    let encode = |disk: &DiskRecord| {
        let registry = Registry {
            generation: 1,
            next_disk_id: 2,
            disks: vec![disk.clone().into()],
            unknown_records: Vec::new(),
        };
        let bytes = registry.encode(pool()).unwrap();
        assert_eq!(Registry::decode(&bytes, pool()).unwrap(), registry);
        let field = bytes.windows(5).position(|w| w == [0x1B, 0, 1, 0, 1]);
        field.is_some()
    };
    assert!(!encode(&plain));
    assert!(encode(&pinned));
}

/// Fields 28 and 29.
#[test]
fn start_and_device_of_a_disk_are_kept() {
    let disk = DiskRecord {
        id: 1,
        name: "a".to_owned(),
        origin: "/dev/a".to_owned(),
        size: 4096,
        on_start: OnStart::Drop,
        device: "wwn 5".to_owned(),
        ..DiskRecord::default()
    };
    let encode = |disk: &DiskRecord| {
        let registry = Registry {
            generation: 1,
            next_disk_id: 2,
            disks: vec![disk.clone().into()],
            unknown_records: Vec::new(),
        };
        let bytes = registry.encode(pool()).unwrap();
        assert_eq!(Registry::decode(&bytes, pool()).unwrap(), registry);
        bytes
    };
    let expected = *b"\x1c\0\x01\0\x01\x1d\0\x05\0wwn 5";
    let is_in = |bytes: &[u8]| bytes.windows(expected.len()).any(|w| w == expected);
    assert!(is_in(&encode(&disk)));
    let keep = DiskRecord {
        on_start: OnStart::Keep,
        ..disk.clone()
    };
    assert!(!is_in(&encode(&keep)));
    let too_long = DiskRecord {
        device: "x".repeat(513),
        ..disk
    };
    assert!(too_long.check().is_err());
}
