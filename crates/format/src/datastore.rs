//! What a pool remembers of a datastore: a directory that is served whole, and to whom.
//!
//! A datastore is a record of the registry beside the disks'. To the parts that store and journal the
//! registry it is one of those that are carried along unread, so that a version that knows no datastores
//! keeps it. The files of it that have become disks are disks like others; their records name the
//! datastore in a field that such a version must refuse ([`DiskRecord::datastore`]).
//!
//! [`DiskRecord::datastore`]: crate::DiskRecord::datastore

use uuid::Uuid;

use crate::disk::{CRITICAL, check_name, field, split_field};
use crate::error::FormatError;
use crate::registry::Registry;

/// Kind of the record in a registry.
pub const RECORD_DATASTORE: u16 = 3;
/// Most bytes of each of its texts.
pub const TEXT_MAX: usize = 32 << 10;

const WHAT: &str = "datastore record";

/// Field tags. Never reuse one.
mod tag {
    pub const NAME: u16 = 1;
    pub const DIRECTORY: u16 = 2;
    pub const SERIAL: u16 = 3;
    pub const LISTEN: u16 = 4;
    pub const CLIENTS: u16 = 5;
    pub const READ_ONLY: u16 = 6;
    pub const HOLD: u16 = 7;
    pub const RULES: u16 = 8;
    /// A version that knows one directory only would change one of two.
    pub const MIRROR: u16 = crate::disk::CRITICAL | 9;
    pub const TREES: u16 = 10;
}

/// One datastore of a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DatastoreRecord {
    /// Unique among the datastores of the pool; as of a disk, see [`check_name`].
    pub name: String,
    /// The directory, as an absolute path.
    pub directory: String,
    /// Tells it from every other one anywhere.
    pub serial: Uuid,
    /// Where its server listens: address and port.
    pub listen: String,
    /// Who may come, and what they may do, one each.
    pub clients: Vec<String>,
    /// Nobody may change anything.
    pub read_only: bool,
    /// The directory has every write before it is answered.
    pub hold: bool,
    /// Settings of files by their names, one each: what the names are like, then `setting=value`, each after a tab.
    pub rules: Vec<String>,
    /// The other directory, which holds the same, as an absolute path; empty if there is none.
    pub mirror: String,
    /// Which of the two are current, as whoever keeps them the same says.
    pub trees: Vec<u8>,
    /// Fields of newer versions, carried along: tag and bytes.
    pub unknown: Vec<(u16, Vec<u8>)>,
}

impl DatastoreRecord {
    fn check(&self) -> Result<(), FormatError> {
        let bad = |lines: &[String]| {
            lines
                .iter()
                .any(|line| line.is_empty() || line.contains('\n'))
        };
        let long =
            |lines: &[String]| lines.iter().map(|line| line.len() + 1).sum::<usize>() > TEXT_MAX;
        let fault = if let Err(fault) = check_name(&self.name) {
            fault
        } else if !self.directory.starts_with('/') {
            "its directory is no absolute path"
        } else if !self.mirror.is_empty() && !self.mirror.starts_with('/') {
            "its other directory is no absolute path"
        } else if self.directory.len().max(self.mirror.len()) > TEXT_MAX {
            "its directory's name is longer than 32 KiB"
        } else if bad(&self.clients) {
            "one of its clients is empty or has a line break in it"
        } else if long(&self.clients) {
            "its clients take more than 32 KiB"
        } else if bad(&self.rules) {
            "one of its rules for files is empty or has a line break in it"
        } else if long(&self.rules) {
            "its rules for files take more than 32 KiB"
        } else if self.listen.len() > 256 {
            "the address it listens on is longer than 256 bytes"
        } else {
            return Ok(());
        };
        Err(FormatError::wrong(
            WHAT,
            format!("datastore {:?}: {fault}", self.name),
        ))
    }

    /// Its bytes as a record of the registry.
    pub fn encode(&self) -> Result<Vec<u8>, FormatError> {
        self.check()?;
        let mut out = Vec::new();
        field(&mut out, tag::NAME, self.name.as_bytes());
        field(&mut out, tag::DIRECTORY, self.directory.as_bytes());
        field(&mut out, tag::SERIAL, self.serial.as_bytes());
        field(&mut out, tag::LISTEN, self.listen.as_bytes());
        field(&mut out, tag::CLIENTS, self.clients.join("\n").as_bytes());
        field(&mut out, tag::READ_ONLY, &[u8::from(self.read_only)]);
        if self.hold {
            field(&mut out, tag::HOLD, &[1]);
        }
        if !self.rules.is_empty() {
            field(&mut out, tag::RULES, self.rules.join("\n").as_bytes());
        }
        if !self.mirror.is_empty() {
            field(&mut out, tag::MIRROR, self.mirror.as_bytes());
            field(&mut out, tag::TREES, &self.trees);
        }
        for (tag, bytes) in &self.unknown {
            field(&mut out, *tag, bytes);
        }
        Ok(out)
    }

    /// Reads one.
    pub fn decode(mut rest: &[u8]) -> Result<DatastoreRecord, FormatError> {
        let mut record = DatastoreRecord::default();
        let lines = |text: String| -> Vec<String> {
            let lines = text.split('\n').filter(|line| !line.is_empty());
            lines.map(str::to_owned).collect()
        };
        let text = |bytes: &[u8]| {
            let text = std::str::from_utf8(bytes);
            text.map(str::to_owned)
                .map_err(|_| FormatError::damaged(WHAT, "a text is no UTF-8"))
        };
        while !rest.is_empty() {
            let (tag, bytes, after) = split_field(rest)?;
            rest = after;
            match tag {
                tag::NAME => record.name = text(bytes)?,
                tag::DIRECTORY => record.directory = text(bytes)?,
                tag::SERIAL => {
                    record.serial = Uuid::from_slice(bytes)
                        .map_err(|_| FormatError::damaged(WHAT, "its serial is no UUID"))?;
                }
                tag::LISTEN => record.listen = text(bytes)?,
                tag::CLIENTS => record.clients = lines(text(bytes)?),
                tag::READ_ONLY => record.read_only = bytes != [0],
                tag::HOLD => record.hold = bytes != [0],
                tag::RULES => record.rules = lines(text(bytes)?),
                tag::MIRROR => record.mirror = text(bytes)?,
                tag::TREES => record.trees = bytes.to_vec(),
                tag if tag & CRITICAL != 0 => {
                    return Err(FormatError::Newer {
                        what: WHAT,
                        feature: format!("field {tag:#06x}"),
                    });
                }
                tag => record.unknown.push((tag, bytes.to_vec())),
            }
        }
        record.check()?;
        Ok(record)
    }
}

impl Registry {
    /// The datastores, in the order in which they were added.
    pub fn datastores(&self) -> Result<Vec<DatastoreRecord>, FormatError> {
        let all = self.unknown_records.iter();
        all.filter(|(kind, _)| *kind == RECORD_DATASTORE)
            .map(|(_, bytes)| DatastoreRecord::decode(bytes))
            .collect()
    }

    /// Adds a datastore, or puts it in place of the one of its name.
    pub fn put_datastore(&mut self, record: &DatastoreRecord) -> Result<(), FormatError> {
        let bytes = record.encode()?;
        match self.datastore_at(&record.name) {
            Some(at) => self.unknown_records[at].1 = bytes,
            None => self.unknown_records.push((RECORD_DATASTORE, bytes)),
        }
        Ok(())
    }

    /// Takes a datastore out.
    pub fn take_datastore(&mut self, name: &str) {
        if let Some(at) = self.datastore_at(name) {
            self.unknown_records.remove(at);
        }
    }

    fn datastore_at(&self, name: &str) -> Option<usize> {
        self.unknown_records.iter().position(|(kind, bytes)| {
            *kind == RECORD_DATASTORE
                && DatastoreRecord::decode(bytes).is_ok_and(|record| record.name == name)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(name: &str) -> DatastoreRecord {
        DatastoreRecord {
            name: name.to_owned(),
            directory: "/srv/vms".to_owned(),
            serial: Uuid::from_u128(7),
            listen: "127.0.0.1:2049".to_owned(),
            clients: vec!["192.0.2.0/24=rw".to_owned(), "::1=ro".to_owned()],
            read_only: true,
            hold: true,
            rules: vec!["*.iso\tmode=\"off\"".to_owned(), "b/*\tmax=4096".to_owned()],
            mirror: "/mnt/b/vms".to_owned(),
            trees: vec![7; 48],
            unknown: vec![(77, vec![1, 2])],
        }
    }

    #[test]
    fn what_is_kept_is_read_again() {
        let pool = Uuid::from_u128(1);
        let mut registry = Registry::default();
        registry.put_datastore(&record("vms")).unwrap();
        registry.put_datastore(&record("isos")).unwrap();
        let mut changed = record("vms");
        changed.read_only = false;
        changed.hold = false;
        changed.rules.clear();
        changed.clients.clear();
        changed.mirror.clear();
        changed.trees.clear();
        registry.put_datastore(&changed).unwrap();
        let bytes = registry.encode(pool).unwrap();
        let mut read = Registry::decode(&bytes, pool).unwrap();
        assert_eq!(read.datastores().unwrap(), [changed, record("isos")]);
        read.take_datastore("vms");
        assert_eq!(read.datastores().unwrap(), [record("isos")]);
    }

    #[test]
    fn damage_and_nonsense_are_refused() {
        let whole = record("vms").encode().unwrap();
        for end in 1..whole.len() {
            if let Ok(record) = DatastoreRecord::decode(&whole[..end]) {
                // Cut between two fields.
                assert!(!record.directory.is_empty());
            }
        }
        let with = |change: &dyn Fn(&mut DatastoreRecord)| {
            let mut bad = record("vms");
            change(&mut bad);
            bad.encode().unwrap_err()
        };
        with(&|r| r.name = "../x".to_owned());
        with(&|r| r.directory = "vms".to_owned());
        with(&|r| r.clients = vec!["a\nb".to_owned()]);
        let mut critical = whole;
        field(&mut critical, CRITICAL | 1000, b"");
        assert!(matches!(
            DatastoreRecord::decode(&critical),
            Err(FormatError::Newer { .. })
        ));
    }
}
