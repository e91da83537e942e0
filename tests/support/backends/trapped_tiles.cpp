// The instructions of AMX on a CPU of x86_64 that has none: it traps at each, and the emulated unit does what the instruction says.
//
// Source: Intel's manual of the architecture, volume 2: 2.3 (VEX), and the instructions.

#include <csignal>
#include <ucontext.h>

#include "emulated_tiles.h"

namespace {

struct sigaction before;

constexpr int REGISTERS[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                               REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

// An instruction behind its prefixes: C4, two bytes, opcode, ModRM, and what its operand in memory takes.
struct Instruction {
    uint8_t prefix, opcode, mode;  // prefix: 0 none, 1 66, 2 F3, 3 F2
    int reg, rm, other;            // registers of ModRM and VEX.vvvv
    char* address;
    int64_t index;                 // scaled: the stride
    int64_t size;

    Instruction(const uint8_t* at, const greg_t* registers)
        : prefix(at[2] & 3), opcode(at[3]), mode(at[4] >> 6), reg(at[4] >> 3 & 7), rm(at[4] & 7), other(~at[2] >> 3 & 15), address(nullptr), index(0), size(5) {
        if (mode == 3) return;
        int base = rm;
        if (rm == 4) {
            const uint8_t sib = at[size++];
            const int number = (sib >> 3 & 7) | (at[1] & 0x40 ? 0 : 8);
            if (number != 4) index = registers[REGISTERS[number]] << (sib >> 6);
            base = sib & 7;
        }
        if (base != 5 || mode) address = reinterpret_cast<char*>(registers[REGISTERS[base | (at[1] & 0x20 ? 0 : 8)]]);
        int32_t wide = 0;
        if (mode == 1) wide = static_cast<int8_t>(at[size]);
        else if (mode == 2 || base == 5) std::memcpy(&wide, at + size, 4);
        size += mode == 1 ? 1 : mode == 2 || base == 5 ? 4 : 0;
        address += wide;
    }

    bool run() const {
        using namespace tile_unit;
        switch (prefix << 8 | opcode) {
            case 0x049: return mode == 3 ? release() : configure(address), true;
            case 0x349: return zero_tile(reg), true;
            case 0x34b: return load_tile(reg, address, index), true;
            case 0x24b: return store_tile(reg, address, index), true;
            case 0x25c: return dot_pairs_of(reg, rm, other), true;
            case 0x25e: return dot_bytes_of(reg, rm, other), true;
            default: return false;
        }
    }
};

void on_trap(int, siginfo_t*, void* context) {
    greg_t* const registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    const uint8_t* const at = reinterpret_cast<const uint8_t*>(registers[REG_RIP]);
    if (at[0] == 0xc4 && (at[1] & 0x1f) == 2) {
        const Instruction found(at, registers);
        if (found.run()) {
            registers[REG_RIP] += found.size;
            return;
        }
    }
    sigaction(SIGILL, &before, nullptr);  // another one: it traps again
}

}  // namespace

extern "C" {

void trap_tiles() {
    struct sigaction action = {};
    action.sa_sigaction = on_trap;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGILL, &action, &before);
}

void release_traps() { sigaction(SIGILL, &before, nullptr); }

}  // extern "C"
