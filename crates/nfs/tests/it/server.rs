//! The server over a tree that does what a test tells it: order, repetition, patience, bounds, rights.

mod puppet;

use crate::common;
use std::io::Write as _;
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use crate::common::{Client, Results, set_size, user};
use anyhow::{Context, Result, bail, ensure};
use hearth_nfs::access::{Access, NOBODY, Network, Rights, Who};
use hearth_nfs::handle::Sealer;
use hearth_nfs::identity::Identity;
use hearth_nfs::ledger::Ledger;
use hearth_nfs::nlm::Lock;
use hearth_nfs::nlm::locks::Locks;
use hearth_nfs::record::{MESSAGE_MAX, mark};
use hearth_nfs::rpc::{self, Call, Credential};
use hearth_nfs::server::{Config, Export, HUNG_READS_MAX, Server};
use hearth_nfs::tree::Tree;
use hearth_nfs::v3::{Args, Create, How, Named, SetAttributes, Status};
use hearth_nfs::xdr::Writer;
use hearth_nfs::{mount, nlm, portmap, v3};
use puppet::{Puppet, handle, key};
use rustix::event::{PollFd, PollFlags};
use rustix::net;

const STORE: u64 = 0x5157;
const SECRET: [u8; 32] = [5; 32];
const ALL: Rights = Rights {
    write: true,
    root: true,
    all_squash: false,
    anonymous: (NOBODY, NOBODY),
    insecure: true,
};

struct Stage {
    server: Server,
    tree: Arc<Puppet>,
}

impl Stage {
    fn new(patience: Duration) -> Result<Stage> {
        Stage::with(patience, Access::nobody().allow("127.0.0.1".parse()?, ALL))
    }

    fn with(patience: Duration, access: Access) -> Result<Stage> {
        Stage::over(Arc::default(), None, patience, access)
    }

    /// The process after another one over the same tree, which has left what is noted of its calls.
    fn after(tree: &Arc<Puppet>, noted: &std::path::Path) -> Result<Stage> {
        let identity = Identity {
            store: STORE,
            secret: SECRET,
        };
        let ledger = Ledger::open(noted, &identity)?;
        let all = Access::nobody().allow("127.0.0.0/8".parse()?, ALL);
        Stage::over(Arc::clone(tree), Some(Arc::new(ledger)), SHORT, all)
    }

    fn over(
        tree: Arc<Puppet>,
        ledger: Option<Arc<Ledger>>,
        patience: Duration,
        access: Access,
    ) -> Result<Stage> {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let config = Config {
            listen: vec![any],
            portmap: Some(any),
            locks: true,
            workers: 4,
            patience,
        };
        let server = Server::start(&config)?;
        let export = Export {
            path: "/vms".into(),
            sealer: Sealer::new(STORE, &SECRET),
            store: STORE,
            tree: Arc::clone(&tree) as Arc<dyn Tree>,
            ledger,
            locks: Arc::new(Locks::in_memory()),
        };
        server.offer(export, access)?;
        Ok(Stage { server, tree })
    }

    fn client(&self) -> Result<Client> {
        Client::connect(self.server.addresses()[0])
    }
}

/// So long that no test sees its end.
const LONG: Duration = Duration::from_secs(3600);
const SHORT: Duration = Duration::from_millis(50);

fn read(file: &[u8]) -> Args<'_> {
    Args::Read {
        file,
        offset: 0,
        count: 4096,
    }
}

fn set(file: &[u8]) -> Args<'_> {
    Args::SetAttr {
        file,
        set: SetAttributes::default(),
        only_if: None,
    }
}

fn write<'a>(file: &'a [u8], data: &'a [u8]) -> Args<'a> {
    Args::durable(file, 0, data)
}

fn create<'a>(dir: &'a [u8], name: &'a [u8]) -> Args<'a> {
    Args::Create {
        at: Named { dir, name },
        what: Create::File(How::Guarded(SetAttributes::default())),
    }
}

/// Asks until the answer is another than "ask again", as clients do; how often that was.
fn persist(client: &mut Client, args: &Args<'_>) -> Result<(usize, Results)> {
    for tries in 1.. {
        let results = client.call(args)?;
        if results.status != Status::JukeBox as u32 {
            return Ok((tries, results));
        }
    }
    unreachable!("there is no last number")
}

#[test]
fn answers_come_in_the_order_in_which_they_are_ready() -> Result<()> {
    let stage = Stage::new(LONG)?;
    let mut client = stage.client()?;
    let (slow, quick) = (handle("slow"), handle("quick"));
    stage.tree.hold("slow");
    let first = client.send(&read(&slow))?;
    let second = client.send(&read(&quick))?;
    let (xid, _) = client.receive()?.context("an answer")?;
    ensure!(xid == second);
    stage.tree.release("slow");
    client.results(first)?.ok()?;
    Ok(())
}

#[test]
fn a_file_that_hangs_holds_up_no_other() -> Result<()> {
    let stage = Stage::new(LONG)?;
    let mut client = stage.client()?;
    let (slow, quick) = (handle("slow"), handle("quick"));
    stage.tree.hold("slow");
    // Many more than there are workers.
    let waiting: Vec<u32> = (0..50)
        .map(|_| client.send(&read(&slow)))
        .collect::<Result<_>>()?;
    for _ in 0..50 {
        client.call(&read(&quick))?.ok()?;
    }
    stage.tree.release("slow");
    for xid in waiting {
        client.results(xid)?.ok()?;
    }
    Ok(())
}

/// What is at hand needs no worker, and there is none: all hang.
#[test]
fn what_is_at_hand_is_answered_though_all_workers_hang() -> Result<()> {
    let stage = Stage::new(LONG)?;
    let mut client = stage.client()?;
    let file = handle("at hand");
    let waiting: Vec<u32> = ["slow", "slower"]
        .iter()
        .flat_map(|name| {
            stage.tree.hold(name);
            let file = handle(name);
            [client.send(&read(&file)), client.send(&read(&file))]
        })
        .collect::<Result<_>>()?;
    stage.tree.wait(|s| s.begun.len() == 4);
    let results = client.call(&read(&file))?.ok()?;
    ensure!(results.bytes.ends_with(&[9; 4096]));
    // What came twice is told once more, and not done again.
    let first = client
        .send_as(900, &write(&file, b"data"))
        .and_then(|()| client.answer(900))?;
    ensure!(first.ends_with(b"at hand."));
    client.send_as(900, &write(&file, b"data"))?;
    ensure!(client.answer(900)? == first);
    // Elsewhere the same file is not at hand.
    let far = client.send(&Args::durable(&file, 1, b"data"))?;
    for name in ["slow", "slower"] {
        stage.tree.release(name);
    }
    for xid in waiting.into_iter().chain([far]) {
        client.results(xid)?.ok()?;
    }
    ensure!(stage.tree.begun("write at hand") == 1);
    Ok(())
}

#[test]
fn what_is_lost_is_answered_nevertheless() -> Result<()> {
    let stage = Stage::new(LONG)?;
    stage
        .client()?
        .call(&read(&handle("lost")))?
        .is(Status::ServerFault)
}

#[test]
fn a_call_sent_twice_is_carried_out_once() -> Result<()> {
    let stage = Stage::new(LONG)?;
    let dir = handle("root");
    let mut client = stage.client()?;
    client.send_as(77, &create(&dir, b".lck-1"))?;
    let answer = client.answer(77)?;
    Results::of(&answer)?.ok()?;
    // Over a new connection, as after the loss of the first.
    let mut again = stage.client()?;
    again.send_as(77, &create(&dir, b".lck-1"))?;
    ensure!(again.answer(77)? == answer);
    // The same number for another call is another call; another number for the same call too.
    again.send_as(77, &create(&dir, b".lck-2"))?;
    again.results(77)?.ok()?;
    again.call(&create(&dir, b".lck-1"))?.is(Status::Exist)?;
    ensure!(stage.tree.begun("create root") == 3);
    Ok(())
}

#[test]
fn a_call_sent_again_while_it_is_carried_out_is_answered_wherever_it_came() -> Result<()> {
    let stage = Stage::new(LONG)?;
    let file = handle("slow");
    stage.tree.hold("slow");
    let mut lost = stage.client()?;
    lost.send_as(5, &write(&file, b"data"))?;
    stage.tree.wait(|s| s.begun.len() == 1);
    drop(lost);
    let mut clients = [stage.client()?, stage.client()?];
    for client in &mut clients {
        client.send_as(5, &write(&file, b"data"))?;
        // It was taken: what came after it over the same connection was answered.
        client.call(&Args::GetAttr { file: &file })?.ok()?;
    }
    stage.tree.release("slow");
    for client in &mut clients {
        client.results(5)?.ok()?;
    }
    ensure!(stage.tree.begun("write slow") == 1);
    Ok(())
}

#[test]
fn nobody_waits_longer_than_patience_lasts() -> Result<()> {
    let stage = Stage::new(SHORT)?;
    let mut client = stage.client()?;
    let file = handle("slow");
    stage.tree.hold("slow");
    client.call(&read(&file))?.is(Status::JukeBox)?;
    // Every worker there may be for it hangs; those who come now were never begun.
    for _ in 0..8 {
        client.call(&read(&file))?.is(Status::JukeBox)?;
    }
    stage.tree.release("slow");
    let (tries, results) = persist(&mut client, &read(&file))?;
    results.ok()?;
    // Those that were not begun in time never are: two hung, and then there were these.
    let begun = stage.tree.begun("read slow");
    ensure!(begun <= 2 + tries, "{begun} of {tries}");
    Ok(())
}

/// A disk that hangs elsewhere holds no worker, and could be asked for more and more as clients ask again.
#[test]
fn only_so_many_reads_of_a_file_hang() -> Result<()> {
    let stage = Stage::new(SHORT)?;
    let mut client = stage.client()?;
    let (away, quick) = (handle("away"), handle("quick"));
    let ask = |client: &mut Client| client.call(&read(&away))?.is(Status::JukeBox);
    let begun = || stage.tree.begun("read away");
    for _ in 0..3 * HUNG_READS_MAX {
        ask(&mut client)?;
    }
    let hung = begun();
    ensure!(hung > 0 && hung <= HUNG_READS_MAX, "{hung}");
    // Of others nothing is held back, nor is anything else that is asked of this one.
    persist(&mut client, &read(&quick))?.1.ok()?;
    persist(&mut client, &Args::GetAttr { file: &away })?
        .1
        .ok()?;
    stage.tree.come_back();
    for _ in 0..1000 {
        ask(&mut client)?;
        if begun() > hung {
            break;
        }
    }
    ensure!(begun() > hung, "none was begun when the others had ended");
    stage.tree.come_back();
    Ok(())
}

#[test]
fn a_change_that_took_too_long_is_not_made_again() -> Result<()> {
    let stage = Stage::new(SHORT)?;
    let mut client = stage.client()?;
    let dir = handle("root");
    stage.tree.hold("root");
    client.call(&create(&dir, b".lck-1"))?.is(Status::JukeBox)?;
    // Clients ask again under a new number.
    client.call(&create(&dir, b".lck-1"))?.is(Status::JukeBox)?;
    stage.tree.release("root");
    stage.tree.wait(|s| s.ended.len() == 1);
    // It is answered as the first one ended: with success, and not with "exists".
    persist(&mut client, &create(&dir, b".lck-1"))?.1.ok()?;
    ensure!(stage.tree.begun("create root") == 1);
    // Who asks once more means it.
    persist(&mut client, &create(&dir, b".lck-1"))?
        .1
        .is(Status::Exist)
}

/// A client at an address of this host.
fn connect_from(from: IpAddr, to: SocketAddr) -> Result<Client> {
    let family = net::AddressFamily::INET;
    let socket = net::socket(family, net::SocketType::STREAM, None)?;
    net::bind(&socket, &SocketAddr::new(from, 0))?;
    net::connect(&socket, &to)?;
    Client::over(socket.into())
}

/// A call in the tree's root that is done after its client was told to ask again.
fn late(tree: &Puppet, client: &mut Client, args: &Args<'_>) -> Result<()> {
    let begun = || tree.state.lock().expect("whole").begun.len();
    let before = begun();
    tree.hold("root");
    // What was not begun in time never is.
    while begun() == before {
        client.call(args)?.is(Status::JukeBox)?;
    }
    tree.release("root");
    tree.wait(|s| s.ended == s.begun);
    Ok(())
}

/// What a client does that was told to ask again, and whose program has given up: it makes the name anew.
#[test]
fn who_does_something_else_with_the_name_asks_for_something_new() -> Result<()> {
    let stage = Stage::new(SHORT)?;
    let mut client = stage.client()?;
    let dir = handle("root");
    let remove = |name| Args::Remove(Named { dir: &dir, name });
    for (other, then) in [(&b"other"[..], true), (&b".lck-1"[..], false)] {
        stage.tree.state.lock().expect("whole").content.clear();
        late(&stage.tree, &mut client, &create(&dir, b".lck-1"))?;
        persist(&mut client, &remove(other))?
            .1
            .is(Status::NotSupp)?;
        let (_, told) = persist(&mut client, &create(&dir, b".lck-1"))?;
        match then {
            true => drop(told.ok()?),
            false => told.is(Status::Exist)?,
        }
    }
    Ok(())
}

/// Else a file that has grown meanwhile would be cut off once more.
#[test]
fn a_write_is_no_other_wish_than_the_size_that_was_set_before() -> Result<()> {
    let stage = Stage::new(SHORT)?;
    let mut client = stage.client()?;
    let file = handle("at hand");
    let begun = || stage.tree.begun("set at hand");
    stage.tree.hold("at hand");
    while begun() == 0 {
        set_size(&mut client, &file, 3)?.is(Status::JukeBox)?;
    }
    client.call(&write(&file, b"data"))?.is(Status::JukeBox)?;
    stage.tree.release("at hand");
    stage.tree.wait(|s| s.ended == s.begun);
    // On a busy machine the answer that is known may be late as well.
    let told = loop {
        let told = set_size(&mut client, &file, 3)?;
        if told.status != Status::JukeBox as u32 {
            break told;
        }
    };
    told.ok()?;
    ensure!(begun() == 1, "it is set again");
    Ok(())
}

/// Before the client asks again it writes a lot.
#[test]
fn what_was_done_late_is_known_however_much_comes_meanwhile() -> Result<()> {
    let stage = Stage::new(SHORT)?;
    let mut client = stage.client()?;
    let (dir, file) = (handle("root"), handle("at hand"));
    late(&stage.tree, &mut client, &create(&dir, b".lck-1"))?;
    for _ in 0..1500 {
        persist(&mut client, &write(&file, b"data"))?.1.ok()?;
    }
    persist(&mut client, &create(&dir, b".lck-1"))?.1.ok()?;
    Ok(())
}

/// The client is told to ask again; the work is done, and the process killed before it asks.
#[test]
fn what_was_done_late_is_known_to_the_next_process() -> Result<()> {
    let noted = tempfile::tempdir()?;
    let tree = Arc::new(Puppet::default());
    let stage = Stage::after(&tree, noted.path())?;
    let dir = handle("root");
    let mut client = stage.client()?;
    // The second begins when the first has ended.
    for name in [b".lck-1", b".lck-2"] {
        late(&tree, &mut client, &create(&dir, name))?;
    }
    // Of that one the client is told before.
    persist(&mut client, &create(&dir, b".lck-2"))?.1.ok()?;
    drop(stage);
    let next = Stage::after(&tree, noted.path())?;
    // Another machine's is another call.
    let mut other = connect_from([127, 0, 0, 2].into(), next.server.addresses()[0])?;
    persist(&mut other, &create(&dir, b".lck-1"))?
        .1
        .is(Status::Exist)?;
    let mut client = next.client()?;
    persist(&mut client, &create(&dir, b".lck-1"))?.1.ok()?;
    for name in [b".lck-1", b".lck-2"] {
        persist(&mut client, &create(&dir, name))?
            .1
            .is(Status::Exist)?;
    }
    Ok(())
}

#[test]
fn a_write_is_never_covered_by_an_older_one_that_hung() -> Result<()> {
    let stage = Stage::new(SHORT)?;
    let mut client = stage.client()?;
    let file = handle("slow");
    stage.tree.hold("slow");
    client.call(&write(&file, b"old"))?.is(Status::JukeBox)?;
    // There is a second worker for this file. It must not overtake the first.
    client.call(&write(&file, b"new"))?.is(Status::JukeBox)?;
    ensure!(stage.tree.begun("write slow") == 1);
    stage.tree.release("slow");
    persist(&mut client, &write(&file, b"new"))?.1.ok()?;
    ensure!(stage.tree.state.lock().expect("whole").content[&key("slow")] == b"new");
    Ok(())
}

#[test]
fn a_client_that_takes_no_answers_is_not_read_from() -> Result<()> {
    let stage = Stage::new(LONG)?;
    let file = handle("file");
    let mut deaf = stage.client()?;
    let calls = 400;
    let big = Args::Read {
        file: &file,
        offset: 0,
        count: v3::TRANSFER_MAX,
    };
    let xids: Vec<u32> = (0..calls).map(|_| deaf.send(&big)).collect::<Result<_>>()?;
    // Others are served meanwhile, and what is done for the deaf one comes to an end.
    let mut other = stage.client()?;
    for _ in 0..20 {
        other.call(&Args::GetAttr { file: &file })?.ok()?;
    }
    // No answer is taken, so however long it goes on, most of the calls are not carried out.
    ensure!(
        stage.tree.begun("read file") < 200,
        "{}",
        stage.tree.begun("read file")
    );
    for xid in xids {
        ensure!(deaf.results(xid)?.ok()?.bytes.len() > v3::TRANSFER_MAX as usize);
    }
    Ok(())
}

/// Connections of one client, as the server has it.
const CONNECTIONS: usize = 64;

#[test]
fn a_client_has_only_so_many_connections() -> Result<()> {
    let stage = Stage::new(LONG)?;
    let file = handle("file");
    let serves = |client: &mut Client| -> Result<bool> {
        let sent = client.send(&Args::GetAttr { file: &file });
        // It may be gone before the call is.
        Ok(sent.is_ok() && matches!(client.receive(), Ok(Some(_))))
    };
    let mut clients = Vec::new();
    for _ in 0..CONNECTIONS {
        let mut client = stage.client()?;
        ensure!(serves(&mut client)?);
        clients.push(client);
    }
    ensure!(!serves(&mut stage.client()?)?, "one too many");
    // Those who are there are served on; and when one goes, there is room again, if not at once.
    for client in &mut clients {
        ensure!(serves(client)?);
    }
    clients.pop();
    while !serves(&mut stage.client()?)? {}
    Ok(())
}

/// More silent connections than places do not keep out a client with a call.
#[test]
fn silent_connections_keep_nobody_out() -> Result<()> {
    let stage = Stage::new(LONG)?;
    let file = handle("file");
    let mut busy = stage.client()?;
    busy.call(&Args::GetAttr { file: &file })?.ok()?;
    let silent = (0..600)
        .map(|_| stage.client())
        .collect::<Result<Vec<Client>>>()?;
    let mut late = stage.client()?;
    for client in [&mut busy, &mut late] {
        client.call(&Args::GetAttr { file: &file })?.ok()?;
    }
    drop(silent);
    Ok(())
}

/// With no file descriptor left, connections wait; those that are there are served, and when one goes, the
/// next is taken.
#[test]
fn who_cannot_be_taken_now_is_taken_later() -> Result<()> {
    const TEST: &str = "server::who_cannot_be_taken_now_is_taken_later";
    const INSIDE: &str = "HEARTH_TEST_INSIDE";
    if std::env::var_os(INSIDE).is_none() {
        // In a process of its own: the others need theirs.
        let output = std::process::Command::new("sh")
            .arg("-c")
            .arg(format!(
                "ulimit -n 40; exec {} --exact {TEST}",
                std::env::current_exe()?.display()
            ))
            .env(INSIDE, "1")
            .output()?;
        let said = format!(
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        ensure!(
            output.status.success() && said.contains("1 passed"),
            "{said}"
        );
        return Ok(());
    }
    let stage = Stage::new(LONG)?;
    let file = handle("file");
    let mut first = stage.client()?;
    first.call(&read(&file))?.ok()?;
    // Each takes two here, on either side; the last ones find none for the server's.
    let mut clients = Vec::new();
    while let Ok(client) = stage.client() {
        clients.push(client);
    }
    ensure!(clients.len() > 5);
    first.call(&read(&file))?.ok()?;
    // Once there is room (for the ends of all that stay, on either side), nobody is forgotten.
    let mut waiting = clients.split_off(clients.len() - 4);
    drop(clients);
    for client in &mut waiting {
        client.call(&read(&file))?.ok()?;
    }
    Ok(())
}

#[test]
fn a_call_in_many_pieces_is_one_call() -> Result<()> {
    let stage = Stage::new(LONG)?;
    let mut client = stage.client()?;
    let message = client.message(
        9,
        &Args::GetAttr {
            file: &handle("file"),
        },
    );
    let pieces = message.len();
    for (n, byte) in message.into_iter().enumerate() {
        let last = if n + 1 == pieces { 0x80 } else { 0 };
        client.stream.write_all(&[last, 0, 0, 1, byte])?;
    }
    client.results(9)?.ok()?;
    Ok(())
}

#[test]
fn who_speaks_something_else_is_cut_off() -> Result<()> {
    let stage = Stage::new(LONG)?;
    let mut client = stage.client()?;
    client.send_raw(b"GET / HTTP/1.1\r\n\r\n")?;
    ensure!(client.receive()?.is_none());
    let mut client = stage.client()?;
    client
        .stream
        .write_all(&(MESSAGE_MAX as u32 + 1).to_be_bytes())?;
    ensure!(client.receive()?.is_none());
    Ok(())
}

#[test]
fn calls_that_are_no_good_are_denied_and_the_connection_goes_on() -> Result<()> {
    let stage = Stage::new(LONG)?;
    let mut client = stage.client()?;
    let mut ask = |program, version, procedure, credential: Credential| -> Result<Vec<u8>> {
        let call = Call {
            xid: 3,
            program,
            version,
            procedure,
            credential,
        };
        let mut w = Writer::new();
        call.write(&mut w);
        client.send_raw(w.as_slice())?;
        client.answer(3)
    };
    ensure!(ask(1, 1, 1, Credential::None)? == rpc::no_program(3).into_vec());
    ensure!(ask(v3::PROGRAM, 4, 1, Credential::None)? == rpc::wrong_version(3, 3, 3).into_vec());
    ensure!(ask(v3::PROGRAM, 3, 22, Credential::None)? == rpc::no_procedure(3).into_vec());
    ensure!(ask(v3::PROGRAM, 3, 1, Credential::None)? == rpc::garbage(3).into_vec());
    ensure!(ask(v3::PROGRAM, 3, 1, Credential::Unknown(6))? == rpc::weak_credential(3).into_vec());
    ensure!(ask(v3::PROGRAM, 3, 0, Credential::None)? == rpc::success(3).into_vec());
    ensure!(ask(mount::PROGRAM, 1, 1, Credential::None)? == rpc::wrong_version(3, 3, 3).into_vec());
    Ok(())
}

#[test]
fn handles_that_are_not_ours_are_refused() -> Result<()> {
    let stage = Stage::new(LONG)?;
    let mut client = stage.client()?;
    let mut forged = handle("file");
    *forged.last_mut().context("not empty")? ^= 1;
    client.call(&read(&forged))?.is(Status::BadHandle)?;
    client.call(&read(b"short"))?.is(Status::BadHandle)?;
    client.call(&read(&[0; 64]))?.is(Status::Stale)?;
    let other = Sealer::new(STORE + 1, &SECRET).seal(&key("file"));
    client.call(&read(&other))?.is(Status::Stale)?;
    // Also where a handle comes second.
    let at = Named {
        dir: &handle("root"),
        name: b"name",
    };
    client
        .call(&Args::Link { file: &forged, at })?
        .is(Status::BadHandle)?;
    client
        .call(&Args::Rename {
            from: at,
            to: Named { dir: &forged, ..at },
        })?
        .is(Status::BadHandle)?;
    client
        .call(&Args::Rename {
            from: at,
            to: Named { dir: &other, ..at },
        })?
        .is(Status::XDev)?;
    ensure!(stage.tree.state.lock().expect("whole").begun.is_empty());
    Ok(())
}

#[test]
fn names_that_are_paths_never_reach_the_tree() -> Result<()> {
    let stage = Stage::new(LONG)?;
    let mut client = stage.client()?;
    let dir = handle("root");
    let long = [b'n'; 256];
    for (name, status) in [
        (&b"a/b"[..], Status::Inval),
        (b"../../etc/passwd", Status::Inval),
        (b"nul\0", Status::Inval),
        (b"", Status::Inval),
        (b"..", Status::Exist),
        (&long, Status::NameTooLong),
    ] {
        client.call(&create(&dir, name))?.is(status)?;
    }
    client
        .call(&Args::Lookup(Named {
            dir: &dir,
            name: b"a/b",
        }))?
        .is(Status::Inval)?;
    client
        .call(&Args::Remove(Named {
            dir: &dir,
            name: b".",
        }))?
        .is(Status::Inval)?;
    ensure!(stage.tree.state.lock().expect("whole").begun.is_empty());
    Ok(())
}

#[test]
fn rights_are_those_of_the_address() -> Result<()> {
    let reader = Rights {
        insecure: true,
        ..Rights::default()
    };
    let stage = Stage::with(LONG, Access::nobody().allow("127.0.0.0/8".parse()?, reader))?;
    let mut client = stage.client()?;
    let file = handle("file");
    client.call(&write(&file, b"x"))?.is(Status::RoFs)?;
    client.call(&read(&file))?.ok()?;
    let seen = || {
        stage
            .tree
            .state
            .lock()
            .expect("whole")
            .who
            .clone()
            .context("somebody")
    };
    ensure!(seen()?.uid == 65534);
    client.credential = user(1000);
    client.call(&read(&file))?.ok()?;
    ensure!(
        seen()?
            == Who {
                uid: 1000,
                gid: 1000,
                groups: vec![]
            }
    );
    // What it may do is told too: the file is root's, mode 0644.
    let results = client
        .call(&Args::Access {
            file: &file,
            asked: 0x3f,
        })?
        .ok()?;
    let mut r = results.reader();
    r.optional(common::attributes)?;
    ensure!(r.u32()? == 1);

    let stage = Stage::with(LONG, Access::nobody().allow("10.0.0.0/8".parse()?, ALL))?;
    ensure!(
        stage.client()?.receive()?.is_none(),
        "nobody from here is known"
    );
    Ok(())
}

/// A connection from a port that only root may use.
fn privileged(to: SocketAddr) -> Result<TcpStream> {
    for port in (600..1024).rev() {
        let family = net::AddressFamily::INET;
        let socket = net::socket(family, net::SocketType::STREAM, None)?;
        match net::bind(&socket, &SocketAddr::from(([127, 0, 0, 1], port))) {
            Ok(()) => {}
            Err(rustix::io::Errno::ADDRINUSE) => continue,
            Err(error) => return Err(error.into()),
        }
        match net::connect(&socket, &to) {
            Ok(()) => return Ok(TcpStream::from(socket)),
            Err(rustix::io::Errno::ADDRNOTAVAIL) => continue,
            Err(error) => return Err(error.into()),
        }
    }
    bail!("all privileged ports are taken")
}

/// Opens a socket that belongs to another account, if this one may do so.
fn as_nobody<T>(open: impl FnOnce() -> Result<T>) -> Result<T> {
    // SAFETY: it changes the calling thread's file system user alone, and touches no memory.
    let before = unsafe { libc::setfsuid(65534) };
    let opened = open();
    // SAFETY: as above.
    unsafe { libc::setfsuid(before as libc::uid_t) };
    opened
}

/// Root could bind a privileged port as well. Where it counts as somebody else, it is one account of many.
#[test]
fn root_of_this_host_needs_no_port_where_it_is_root() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        println!("SKIPPED root over any port: this needs root");
        return Ok(());
    }
    let own: Network = "127.0.0.0/8".parse()?;
    for root in [true, false] {
        let rights = Rights {
            write: true,
            root,
            ..Rights::default()
        };
        let stage = Stage::with(LONG, Access::nobody().allow(own, rights))?;
        let mounted = stage.client()?.mount("/vms")?;
        ensure!(mounted.is_ok() == root, "root counts as root: {root}");
        let other = as_nobody(|| stage.client())?.mount("/vms")?;
        ensure!(other == Err(Status::Access as u32));
    }
    Ok(())
}

/// Whoever has an account on this host can say over a socket of his own that he is anybody.
#[test]
fn unprivileged_port_of_this_host_is_refused() -> Result<()> {
    let own: Network = "127.0.0.0/8".parse()?;
    let (write, root) = (true, true);
    let rights = Rights {
        write,
        root,
        ..Rights::default()
    };
    let access = |rights| Access::nobody().allow(own, rights);
    let stage = Stage::with(LONG, access(rights))?;
    let mut client = as_nobody(|| stage.client())?;
    let file = handle("file");
    ensure!(client.mount("/vms")? == Err(Status::Access as u32));
    // Whoever knows a handle gets no further, whatever he asks.
    client.call(&read(&file))?.is(Status::Access)?;
    client.call(&self::write(&file, b"x"))?.is(Status::Access)?;
    client
        .call(&Args::GetAttr { file: &file })?
        .is(Status::Access)?;
    client.credential = Credential::None;
    client.call(&set(&file))?.is(Status::Access)?;
    let from = client.stream.local_addr()?;
    ensure!(stage.server.refused(STORE) == Some(from));
    if rustix::process::geteuid().is_root() {
        let mut client = Client::over(privileged(stage.server.addresses()[0])?)?;
        ensure!(client.mount("/vms")? == Ok(handle("root")));
        client.call(&read(&file))?.ok()?;
    }
    let insecure = Rights {
        insecure: true,
        ..rights
    };
    ensure!(stage.server.set_access(STORE, access(insecure)));
    ensure!(stage.server.refused(STORE).is_none());
    client.call(&read(&file))?.ok()?;
    ensure!(client.mount("/vms")? == Ok(handle("root")));
    Ok(())
}

#[test]
fn only_what_is_there_is_mounted() -> Result<()> {
    let stage = Stage::new(LONG)?;
    let mut client = stage.client()?;
    ensure!(client.mount("/vms")? == Ok(handle("root")));
    ensure!(client.mount("//vms/./")? == Ok(handle("root")));
    ensure!(client.mount("/")? == Err(2));
    ensure!(client.mount("/vms2")? == Err(2));
    ensure!(client.mount("/vms/none")? == Err(2));
    Ok(())
}

#[test]
fn a_listing_fits_in_what_was_asked_for() -> Result<()> {
    let stage = Stage::new(LONG)?;
    let mut client = stage.client()?;
    let dir = handle("root");
    for bytes in [0, 100, 150] {
        let args = Args::ReadDir {
            dir: &dir,
            cookie: 0,
            verifier: [0; 8],
            bytes,
        };
        if bytes < 150 {
            client.call(&args)?.is(Status::TooSmall)?;
        } else {
            client.call(&args)?.ok()?;
        }
    }
    for bytes in [200, 1000, 4096, u32::MAX] {
        for plus in [false, true] {
            let (mut cookie, mut names) = (0, 0);
            loop {
                let verifier = [0; 8];
                let args = if plus {
                    Args::ReadDirPlus {
                        dir: &dir,
                        cookie,
                        verifier,
                        names: bytes,
                        bytes,
                    }
                } else {
                    Args::ReadDir {
                        dir: &dir,
                        cookie,
                        verifier,
                        bytes,
                    }
                };
                let results = client.call(&args)?.ok()?;
                ensure!(results.bytes.len() + 4 <= bytes as usize);
                let mut r = results.reader();
                r.optional(common::attributes)?;
                r.u64()?;
                while r.bool()? {
                    ensure!(r.u64()? == names);
                    ensure!(r.opaque(255)? == format!("name-{names}").as_bytes());
                    cookie = r.u64()?;
                    if plus {
                        ensure!(!r.bool()? && !r.bool()?);
                    }
                    names += 1;
                }
                let end = r.bool()?;
                r.end()?;
                if end {
                    break;
                }
            }
            ensure!(names == 1000, "{names}");
        }
    }
    Ok(())
}

#[test]
fn ports_are_told_over_both_transports() -> Result<()> {
    let stage = Stage::new(LONG)?;
    let at = stage.server.portmap().context("a portmapper")?;
    let port = u32::from(stage.server.addresses()[0].port());
    let question = |program: u32| {
        let call = Call {
            xid: 4,
            program: portmap::PROGRAM,
            version: 2,
            procedure: 3,
            credential: Credential::None,
        };
        let mut w = Writer::new();
        call.write(&mut w);
        w.u32(program).u32(3).u32(portmap::TCP).u32(0);
        w.into_vec()
    };
    let told = |answer: &[u8]| -> Result<u32> { Ok(Results::of(answer)?.status) };
    let mut client = Client::connect(at)?;
    client.send_raw(&question(v3::PROGRAM))?;
    ensure!(told(&client.answer(4)?)? == port);
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    socket.set_read_timeout(Some(Duration::from_secs(30)))?;
    // What is no question gets no answer, and does no harm.
    socket.send_to(&[0; 3], at)?;
    socket.send_to(&question(mount::PROGRAM), at)?;
    let mut bytes = [0; 100];
    let len = socket.recv(&mut bytes)?;
    ensure!(told(&bytes[..len])? == port);
    Ok(())
}

/// Damaged calls to all procedures: each gets an answer or costs its connection, and whoever behaves is served
/// all the while.
#[test]
fn a_flood_of_damaged_calls_does_no_harm() -> Result<()> {
    let stage = Stage::new(LONG)?;
    let mut dice = 0x1234_5678_9abc_def1u64;
    let mut roll = move |below: usize| {
        dice ^= dice << 13;
        dice ^= dice >> 7;
        dice ^= dice << 17;
        (dice % below as u64) as usize
    };
    let mut polite = stage.client()?;
    let mut client = stage.client()?;
    let (dir, file) = (handle("root"), handle("file"));
    let at = Named {
        dir: &dir,
        name: b"name",
    };
    let calls = [
        Args::GetAttr { file: &file },
        set(&file),
        Args::Lookup(at),
        Args::Access {
            file: &file,
            asked: 63,
        },
        Args::ReadLink { link: &file },
        read(&file),
        write(&file, b"some data"),
        create(&dir, b"name"),
        Args::Remove(at),
        Args::Rename { from: at, to: at },
        Args::Link { file: &file, at },
        Args::ReadDir {
            dir: &dir,
            cookie: 0,
            verifier: [0; 8],
            bytes: 2000,
        },
        Args::ReadDirPlus {
            dir: &dir,
            cookie: 0,
            verifier: [0; 8],
            names: 2000,
            bytes: 2000,
        },
        Args::FsStat { root: &dir },
        Args::FsInfo { root: &dir },
        Args::PathConf { file: &dir },
        Args::Commit {
            file: &file,
            offset: 0,
            count: 0,
        },
    ];
    let (mut cut_off, mut answered) = (0, 0);
    for round in 0..30_000u32 {
        let mut message = client.message(round, &calls[roll(calls.len())]);
        for _ in 0..roll(4) {
            let at = roll(message.len());
            match roll(3) {
                0 => message[at] ^= 1 << roll(8),
                1 => message[at] = [0, 0xff, 0x7f][roll(3)],
                _ => message.truncate(at.max(1)),
            }
        }
        client.send_raw(&message)?;
        // Whatever number its answer has: there is one, or the end.
        match client.receive()? {
            Some(_) => answered += 1,
            None => {
                cut_off += 1;
                client = stage.client()?;
            }
        }
        if round % 1000 == 0 {
            polite.call(&Args::GetAttr { file: &file })?.ok()?;
        }
    }
    ensure!(cut_off > 500 && answered > 10_000, "{cut_off} {answered}");
    Ok(())
}

#[test]
fn the_last_answers_go_out_before_it_stops() -> Result<()> {
    let stage = Stage::new(LONG)?;
    let mut client = stage.client()?;
    let file = handle("slow");
    stage.tree.hold("slow");
    let xid = client.send(&read(&file))?;
    stage.tree.wait(|s| s.begun.len() == 1);
    let Stage { server, tree } = stage;
    let stopping = std::thread::spawn(move || drop(server));
    tree.release("slow");
    client.results(xid)?.ok()?;
    ensure!(client.receive()?.is_none());
    stopping.join().expect("it stops");
    Ok(())
}

#[test]
fn a_withdrawn_export_is_stale() -> Result<()> {
    let stage = Stage::new(LONG)?;
    let mut client = stage.client()?;
    client.call(&read(&handle("file")))?.ok()?;
    stage.server.withdraw(STORE);
    client.call(&read(&handle("file")))?.is(Status::Stale)?;
    Ok(())
}

/// Memory of this process.
fn resident() -> Result<usize> {
    let statm = std::fs::read_to_string("/proc/self/statm")?;
    let pages = statm.split(' ').nth(1).context("two numbers")?;
    Ok(pages.parse::<usize>()? * 4096)
}

/// Calls that are answered at once, by a client that reads none of the answers: 28 bytes of an answer take ten times as many.
#[test]
fn client_that_reads_nothing_holds_bounded_memory() -> Result<()> {
    const CONNECTIONS: usize = 6;
    // What one client may hold, and what the server, its clients here and the allocator take besides.
    const MOST: usize = (64 << 20) + (48 << 20);
    let all = Access::nobody().allow("127.0.0.0/8".parse()?, ALL);
    let stage = Stage::with(LONG, all)?;
    let at = stage.server.addresses()[0];
    let null = Call {
        xid: 1,
        program: v3::PROGRAM,
        version: v3::VERSION,
        procedure: 0,
        credential: Credential::None,
    };
    let mut w = Writer::new();
    null.write(&mut w);
    let message = w.into_vec();
    let calls = [&mark(message.len())[..], &message].concat().repeat(1000);
    let before = resident()?;
    let greedy = (0..CONNECTIONS).map(|_| -> Result<_> {
        let stream = std::net::TcpStream::connect(at)?;
        stream.set_nonblocking(true)?;
        Ok((stream, 0))
    });
    let mut greedy = greedy.collect::<Result<Vec<_>>>()?;
    loop {
        let polled = greedy.iter();
        let mut polled: Vec<_> = polled
            .map(|(stream, _)| PollFd::new(stream, PollFlags::OUT))
            .collect();
        // Far longer than the server takes to read what is there.
        let second = rustix::event::Timespec {
            tv_sec: 1,
            tv_nsec: 0,
        };
        if rustix::event::poll(&mut polled, Some(&second))? == 0 {
            break;
        }
        drop(polled);
        for (stream, sent) in &mut greedy {
            match stream.write(&calls[*sent % calls.len()..]) {
                Ok(len) => *sent += len,
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(e) => return Err(e.into()),
            }
        }
        let held = resident()?.saturating_sub(before);
        ensure!(held < MOST, "{} MiB are held", held >> 20);
    }
    // Others are answered, and it is itself when its connections are gone.
    let honest = |from: &str| -> Result<()> {
        let mut client = connect_from(from.parse()?, at)?;
        let xid = client.send(&read(&handle("quick")))?;
        client.results(xid)?.ok()?;
        Ok(())
    };
    honest("127.0.0.2")?;
    drop(greedy);
    honest("127.0.0.1")
}

/// A lock whose file the tree looks for in vain: it is refused, and none is left behind.
#[test]
fn lock_that_hangs_is_refused_and_not_held() -> Result<()> {
    let stage = Stage::new(SHORT)?;
    let mut client = stage.client()?;
    let file = handle("looked at");
    let lock = |caller: &'static [u8]| Lock {
        caller,
        file: &file,
        owner: b"o",
        process: 1,
        offset: 0,
        len: 0,
    };
    let asked = |caller| nlm::Args::Lock {
        block: false,
        exclusive: true,
        lock: lock(caller),
        reclaim: false,
        state: 1,
        monitored: true,
    };
    stage.tree.hold("looked at");
    ensure!(common::nlm(&mut client, &asked(b"one"))? == nlm::Status::NoLocks as u32);
    stage.tree.release("looked at");
    stage
        .tree
        .wait(|s| s.ended.iter().any(|e| e == "look looked at"));
    // The first may be a moment between looking and locking, and gives back what it took.
    let since = std::time::Instant::now();
    loop {
        match common::nlm(&mut client, &asked(b"two"))? {
            0 => return Ok(()),
            status => ensure!(
                status == nlm::Status::Denied as u32 && since.elapsed() < Duration::from_secs(20),
                "{status}"
            ),
        }
    }
}
